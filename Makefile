# Each target works on a fresh clone with only Python (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-ecosystem check docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo             train a language model kept, checkpointed and reversed: what it saves"
	@echo "make test             run all tests"
	@echo "make test-ecosystem   tests together with Accelerate, Lightning, transformers, peft and others"
	@echo "make check            lint, types, doctests, documentation"
	@echo "make docs             serve the documentation"
	@echo "make bench            the benchmark against the peers, small, on the CPU"

demo: .venv/installed
	$(BIN)/retrograd demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore tests/ecosystem

test-ecosystem: .venv/ecosystem
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/ecosystem

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q --doctest-modules --ignore src/retrograd/kernels.py src/retrograd
	$(BIN)/zensical build --strict --clean

docs: .venv/installed
	$(BIN)/zensical serve

bench: .venv/installed benchmarks/.peers
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py --config small --device cpu --without 'compile*' '*-compiled'

benchmarks/.peers: benchmarks/requirements-peers.txt
	$(BIN)/pip install --quiet --no-deps --target $@ --requirement $<

.venv/installed: pyproject.toml constraints.txt tests/requirements-seeds.txt
	@echo "installing into .venv: a minute or more"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cli,dev,docs]"
	$(BIN)/pip install --quiet --no-deps --requirement tests/requirements-seeds.txt
	touch $@

.venv/ecosystem: .venv/installed tests/requirements-ecosystem.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement tests/requirements-ecosystem.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .cache site
