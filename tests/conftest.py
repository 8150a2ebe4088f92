"""Every test starts from the same seed and must leave torch as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from retrograd import phase


def _global_state() -> dict[str, object]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "attention backends": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "running update": phase(),
    }


@pytest.fixture(autouse=True)
def _clean_torch() -> Iterator[None]:
    torch.manual_seed(0)
    before = _global_state()
    yield
    assert _global_state() == before
