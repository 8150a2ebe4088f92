# Each target works on a fresh clone with only Python (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small reversible network and show what it saves"
	@echo "make test    run all tests"
	@echo "make check   lint, types, doctests"
	@echo "make bench   the benchmark against the peers, small, on the CPU"

demo: .venv/installed
	$(BIN)/python examples/quickstart.py

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q --doctest-modules --ignore src/retrograd/kernels.py src/retrograd

bench: .venv/installed benchmarks/.peers
	$(BIN)/python benchmarks/bench.py --config tiny --device cpu --without 'compile*' '*-compiled'

benchmarks/.peers: benchmarks/requirements-peers.txt
	$(BIN)/pip install --quiet --no-deps --target $@ --requirement $<

.venv/installed: pyproject.toml constraints.txt tests/requirements-seeds.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cli,dev]"
	$(BIN)/pip install --quiet --no-deps --requirement tests/requirements-seeds.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
