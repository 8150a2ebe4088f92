"""The arithmetic behind `ExactAdd`, against integers: exact where it promises, straight-through, saving nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import jvp, vmap

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.rounding import rounded_add

GRID = 2.0**-13


def _add(target: Tensor, out: Tensor, gain: float = 1.0, flag: Tensor | None = None, grid: float = GRID) -> Tensor:
    return rounded_add(target, out, grid, gain, flag, grid * 2.0**24)


def _on_grid(*shape: int, grid: float = GRID) -> Tensor:
    return torch.randint(-(2**20), 2**20, shape) * grid


integers = st.integers(-(2**24) + 1, 2**24 - 1)


@settings(deadline=None, max_examples=300)
@given(integers, integers, st.integers(-30, 20))
def test_sums_are_those_of_integers_and_are_undone_to_the_bit(target: int, out: int, exponent: int) -> None:
    """Even where the output alone would leave the range, if the sum does not."""
    grid = 2.0**exponent
    new = _add(torch.tensor([target * grid]), torch.tensor([out * grid]), grid=grid)
    if abs(target + out) < 2**24:
        assert new.item() / grid == target + out
        assert _add(new, torch.tensor([out * grid]), -1.0, grid=grid).item() == target * grid


@settings(deadline=None, max_examples=300)
@given(
    integers,
    st.floats(-2000, 2000, width=32),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([1.0, 2.0, 0.1, -0.7]),
)
def test_any_output_of_any_dtype_is_undone_to_the_bit(target: int, out: float, dtype: torch.dtype, gain: float) -> None:
    before, value = torch.tensor([target * GRID]), torch.tensor([out]).to(dtype)
    after = _add(before, value, gain)
    if after.abs() < 2048:
        assert torch.equal(_add(after, value, -gain), before)
        assert abs(after - before - value.float() * gain) <= GRID / 2 + 1e-6 * abs(out)


def test_it_rounds_to_the_nearest_step() -> None:
    out = torch.tensor([0.4, 0.5, 0.6, 1.5, -0.4, -0.5, -0.6]) * GRID
    steps = _add(torch.zeros(7), out) / GRID
    assert steps.tolist() == [0, 0, 1, 2, 0, 0, -1]  # halves to even, so that -out takes back what out gave


def test_float64() -> None:
    target, out = _on_grid(100).double(), torch.randn(100, dtype=torch.double)
    assert torch.equal(_add(_add(target, out), out, -1.0), target)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "empty", "scalar"])
def test_layouts(layout: str) -> None:
    target, out = _on_grid(3, 4), torch.randn(3, 4)
    if layout == "transposed":
        out = torch.randn(4, 3).t()
    elif layout == "expanded":
        out = torch.randn(4).expand(3, 4)
    elif layout == "empty":
        target, out = target[:0], out[:0]
    elif layout == "scalar":
        target, out = target[0, 0], out[0, 0]
    flag = torch.zeros((), dtype=torch.bool)
    new = _add(target, out, flag=flag)
    assert torch.equal(new, target + (out / GRID).round() * GRID)
    assert new.shape == target.shape
    assert not flag


# ---- the flag


@pytest.mark.parametrize(("value", "expected"), [(2047.9, False), (2048.0, True), (-2047.9, False), (-2048.0, True)])
def test_the_flag_is_set_at_the_limit(value: float, expected: bool) -> None:
    flag = torch.zeros((), dtype=torch.bool)
    _add(torch.zeros(10), torch.tensor([0.0] * 9 + [value]), flag=flag)
    assert bool(flag) == expected


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30])
def test_the_flag_is_set_far_outside(value: float) -> None:
    flag = torch.zeros((), dtype=torch.bool)
    _add(torch.zeros(3), torch.tensor([0.0, value, 0.0]), flag=flag)
    assert flag


def test_the_flag_is_set_by_what_is_not_a_number() -> None:
    """It could not be undone either: nan - out is nan."""
    flag = torch.zeros((), dtype=torch.bool)
    _add(torch.zeros(3), torch.tensor([0.0, float("nan"), 0.0]), flag=flag)
    assert flag


def test_a_flag_once_set_stays_set() -> None:
    flag = torch.ones((), dtype=torch.bool)
    _add(torch.zeros(3), torch.zeros(3), flag=flag)
    assert flag


# ---- gradients


@pytest.mark.parametrize("gain", [1.0, 2.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_passes_straight_through(gain: float, dtype: torch.dtype) -> None:
    target, out = _on_grid(5).requires_grad_(), torch.randn(5).to(dtype).requires_grad_()
    grad = torch.randn(5)
    for_target, for_out = torch.autograd.grad(_add(target, out, gain), (target, out), grad)
    assert torch.equal(for_target, grad)
    assert torch.equal(for_out, (grad * gain).to(dtype))


def test_double_backward() -> None:
    out = torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad(_add(torch.zeros(5), out, 3.0).square().sum(), out, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), out)
    assert torch.equal(second, torch.full((5,), 18.0))


def test_it_saves_nothing() -> None:
    saved: list[Tensor] = []
    target, out = _on_grid(5).requires_grad_(), torch.randn(5, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None), LiveBytes() as memory:
        new = _add(target, out, 2.0, torch.zeros((), dtype=torch.bool))
    assert saved == []
    assert memory.live == new.nbytes  # the flag is gone with the call
    graph = new.grad_fn
    del new
    assert memory.live == 0
    assert graph is not None


@pytest.mark.parametrize("which", ["target", "out", "both"])
def test_forward_mode(which: str) -> None:
    target, out, direction = _on_grid(5), torch.randn(5), torch.randn(5)
    if which == "both":
        _, found = jvp(lambda t, o: _add(t, o, 2.0), (target, out), (direction, direction))
        torch.testing.assert_close(found, 3 * direction)
    elif which == "target":
        _, found = jvp(lambda t: _add(t, out, 2.0), (target,), (direction,))
        assert torch.equal(found, direction)
    else:
        _, found = jvp(lambda o: _add(target, o, 2.0), (out,), (direction,))
        assert torch.equal(found, 2 * direction)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap(in_dims: tuple[int | None, int | None]) -> None:
    target, out = _on_grid(4, 4), torch.randn(4, 4)
    found = vmap(_add, in_dims=in_dims)(target, out)
    for i in range(4):
        t, o = (each if dim is None else each.select(dim, i) for each, dim in zip((target, out), in_dims, strict=True))
        assert torch.equal(found[i], _add(*torch.broadcast_tensors(t, o)))


# ---- the kernel


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_gives_the_same_bits() -> None:
    dtypes, gains, sizes = (torch.float32, torch.bfloat16, torch.float16), (1.0, 2.0, 0.1), (1, 1000, 1 << 20)
    for dtype, gain, size in itertools.product(dtypes, gains, sizes):
        target, out = _on_grid(size), torch.randn(size).to(dtype)
        flag = torch.zeros((), dtype=torch.bool, device="cuda")
        new = _add(target.cuda(), out.cuda(), gain, flag)
        assert torch.equal(new.cpu(), _add(target, out, gain))
        assert torch.equal(_add(new, out.cuda(), -gain).cpu(), target)
        assert not flag
        _add(target.cuda() * 0, torch.full_like(new, 3e3), 1.0, flag)
        assert flag


def test_programs_use_it() -> None:
    assert rg.ExactAdd().apply(torch.zeros(1), torch.tensor([1e-6])) == 0
