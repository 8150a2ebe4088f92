"""`make test-ecosystem` runs these tests. Without the packages of requirements-ecosystem.txt none is collected."""

from __future__ import annotations

import importlib.util

PACKAGES = ["accelerate", "lightning", "onnxruntime", "onnxscript", "peft", "safetensors", "torchao", "transformers"]

collect_ignore_glob = [] if all(map(importlib.util.find_spec, PACKAGES)) else ["test_*.py"]
