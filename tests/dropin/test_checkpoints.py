"""Checkpoints of the published classes load into ours, and ours into the published classes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import CASES, BatchNormLast, Case, data, networks
from published import MODELS
from torch import nn

import retrograd as rg
import retrograd.dropin

Sequence = retrograd.dropin.reformer.ReversibleSequence


def scrambled(module: nn.Module) -> nn.Module:
    """The same module with other weights and buffers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.rand_like(tensor) if tensor.is_floating_point() else tensor + 7)
    return module


def write_copies(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, Sequence):
            part.write_irrev_blocks = True


def without_copies(keys: object) -> set[str]:
    return {key for key in keys if "irrev_blocks." not in key}  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_from_published_to_ours(case: Case) -> None:
    published = scrambled(case.build("published", networks(norm=BatchNormLast))).eval()
    ours = case.build("ours", networks(norm=BatchNormLast)).eval()
    assert without_copies(published.state_dict()) == set(ours.state_dict())
    ours.load_state_dict(published.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(case.run(ours, data()), case.run(published, data()))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_from_ours_to_published(case: Case) -> None:
    ours = scrambled(case.build("ours", networks(norm=BatchNormLast))).eval()
    write_copies(ours)
    published = case.build("published", networks(norm=BatchNormLast)).eval()
    published.load_state_dict(ours.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(case.run(published, data()), case.run(ours, data()))


@pytest.mark.parametrize("name", MODELS)
def test_models_both_ways(name: str) -> None:
    published = MODELS[name](0.0).module
    with retrograd.dropin.install():
        ours = MODELS[name](0.0).module
    scrambled(published)
    state = published.state_dict()
    keys = list(state)
    ours.load_state_dict(state, strict=True)
    assert list(state) == keys  # the caller's dict is left alone
    assert set(ours.state_dict()) == without_copies(keys)
    loaded = ours.state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in loaded)

    write_copies(ours)
    scrambled(ours)
    published.load_state_dict(ours.state_dict(), strict=True)
    state = ours.state_dict()
    assert set(state) == set(keys)
    assert all(torch.equal(value, state[key]) for key, value in published.state_dict().items())


def test_reformer_copies_are_written_on_request_only() -> None:
    (case,) = (case for case in CASES if case.name == "reformer")
    ours, published = case.build("ours"), case.build("published")
    assert not any("irrev" in key for key in ours.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        published.load_state_dict(ours.state_dict(), strict=True)
    write_copies(ours)
    state = ours.state_dict()
    assert set(state) == set(published.state_dict())
    assert state["irrev_blocks.0.f.linear.weight"].data_ptr() == state["blocks.0.f.net.linear.weight"].data_ptr()
    case.build("ours").load_state_dict(state, strict=True)


def test_a_key_that_does_not_belong_is_still_refused() -> None:
    ours = CASES[1].build("ours")
    state = ours.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict(state | {"blocks.0.h.net.weight": torch.zeros(1)}, strict=True)
    del state["blocks.0.f.net.linear.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(state, strict=True)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_copies_and_pickles(case: Case) -> None:
    ours = case.build("ours").eval()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(case.build("ours").eval()))):
        assert isinstance(other, rg.Reversible)
        assert set(other.state_dict()) == set(ours.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(case.run(other, data()), case.run(ours, data()), rtol=0, atol=0)
