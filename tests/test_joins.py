"""Each join by itself: undoing gives back, and what cannot be a join is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import retrograd as rg
from retrograd.joins import Inverse


class Subtract(rg.Join):
    """A join of a user."""

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        return target - out[0]

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return target + out[0]


JOINS = [
    rg.Add(),
    rg.Scale(),
    rg.Scale(keep=0.9, gain=0.1),
    rg.Scale(keep=-2, gain=3),
    rg.Affine(),
    rg.ExactAdd(2.0**-40),
    rg.ExactAdd(2.0**-40, gain=2.0),
    Subtract(),
]


def _named(join: rg.Join) -> str:
    return repr(join).split(" ")[0].removeprefix("<")


def _on_grid(*shape: int) -> Tensor:
    """Values that every join in JOINS can hold exactly where it promises to."""
    return rg.ExactAdd(2.0**-40).enter(torch.randn(shape, dtype=torch.double))


@pytest.mark.parametrize("join", JOINS, ids=_named)
def test_invert_undoes_apply(join: rg.Join) -> None:
    target, out = _on_grid(4, 5), torch.randn(join.parts, 4, 5, dtype=torch.double)
    after = join.apply(target, *out)
    assert not torch.allclose(after, target)
    torch.testing.assert_close(join.invert(after, *out), target, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("join", JOINS, ids=_named)
def test_neither_works_in_place(join: rg.Join) -> None:
    target, out = _on_grid(4, 5), torch.randn(join.parts, 4, 5, dtype=torch.double)
    before = target.clone(), out.clone()
    join.invert(join.apply(target, *out), *out)
    assert torch.equal(target, before[0])
    assert torch.equal(out, before[1])
    assert target._version == out._version == 0


@pytest.mark.parametrize("join", JOINS, ids=_named)
def test_the_inverse_of_a_join_is_a_join(join: rg.Join) -> None:
    target, out = _on_grid(4, 5), torch.randn(join.parts, 4, 5, dtype=torch.double)
    back = join.inverse()
    assert back.parts == join.parts
    torch.testing.assert_close(back.apply(target, *out), join.invert(target, *out))
    torch.testing.assert_close(back.invert(target, *out), join.apply(target, *out))
    torch.testing.assert_close(back.inverse().apply(target, *out), join.apply(target, *out))


# Not of ExactAdd: a step of the grid has no derivative. It passes straight through, see test_rounding.py.
@pytest.mark.parametrize("join", [join for join in JOINS if not isinstance(join, rg.ExactAdd)], ids=_named)
def test_gradients_by_finite_differences(join: rg.Join) -> None:
    inputs = [torch.randn(3, dtype=torch.double, requires_grad=True) for _ in range(1 + join.parts)]
    assert torch.autograd.gradcheck(join.apply, inputs)
    assert torch.autograd.gradcheck(join.invert, inputs)


@pytest.mark.parametrize("join", [rg.Add(), rg.ExactAdd(2.0**-40)], ids=_named)
def test_a_scaled_join_weighs_its_output(join: rg.Join) -> None:
    target, out = _on_grid(4), torch.randn(4, dtype=torch.double)
    torch.testing.assert_close(join.scaled(3.0).apply(target, out), join.apply(target, 3 * out))


@pytest.mark.parametrize("join", [rg.Affine(), Subtract()], ids=_named)
def test_a_join_that_cannot_weigh_says_so(join: rg.Join) -> None:
    with pytest.raises(TypeError, match=f"{type(join).__name__} cannot weigh its output"):
        join.scaled(2.0)


def test_a_scaled_scale() -> None:
    assert rg.Scale(0.5, 3.0).scaled(2.0) == rg.Scale(0.5, 6.0)


def test_the_values_are_those_of_the_formulas() -> None:
    target, out, shift = torch.tensor([4.0]), torch.tensor([1.0]), torch.tensor([3.0])
    assert rg.Add().apply(target, out) == 5
    assert rg.Scale(0.5, 2.0).apply(target, out) == 4
    assert rg.Scale(0.5, 2.0).invert(target, out) == 4
    torch.testing.assert_close(rg.Affine().apply(target, out, shift), torch.tensor([4 * math.e + 3]))
    assert rg.ExactAdd(0.5).apply(target, torch.tensor([0.3])) == 4.5
    assert rg.ExactAdd(0.5).apply(target, torch.tensor([0.2])) == 4.0


def test_joins_are_frozen_and_equal_by_value() -> None:
    assert rg.ExactAdd(range=2048) == rg.ExactAdd()
    assert rg.Scale(0.5) == rg.Scale(0.5) != rg.Scale(0.6)
    assert len({rg.Add(), rg.Add(), rg.Affine()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        rg.Scale().keep = 2.0  # type: ignore[misc]


def test_the_inverse_of_a_join_without_one_of_its_own() -> None:
    assert rg.Affine().inverse() == Inverse(rg.Affine())
    assert Inverse(rg.Affine()).inverse() == rg.Affine()


def test_a_join_needs_both_methods() -> None:
    class Half(rg.Join):
        def apply(self, target: Tensor, *out: Tensor) -> Tensor:
            return target

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


# ---- what is refused


def test_scale_that_forgets_its_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=0 forgets the target.*another value"):
        rg.Scale(keep=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "1", None])
@pytest.mark.parametrize("name", ["keep", "gain"])
def test_scale_takes_finite_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite number"):
        rg.Scale(**{name: value})


@pytest.mark.parametrize("grid", [0, -(2.0**-3), 0.1, 3, float("inf"), float("nan"), "fine", None])
def test_exact_add_takes_a_power_of_two(grid: object) -> None:
    with pytest.raises(ValueError, match=r"grid must be a power of two such as 2\*\*-13"):
        rg.ExactAdd(grid)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), float("nan"), "wide"])
def test_exact_add_takes_a_positive_range(given: object) -> None:
    with pytest.raises(ValueError, match="range must be a positive number"):
        rg.ExactAdd(range=given)  # type: ignore[arg-type]


def test_exact_add_takes_grid_or_range() -> None:
    with pytest.raises(ValueError, match="grid or range, not both"):
        rg.ExactAdd(2.0**-10, range=5.0)


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5])
@pytest.mark.parametrize("above", [1.0, 1.3, 1.99])
def test_the_range_asked_for_is_given(exponent: int, above: float) -> None:
    """And no more than twice as much, which would waste a bit."""
    asked = above * 2.0**exponent
    assert asked <= rg.ExactAdd(range=asked).limit(torch.float32) < 2 * asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_exact_add_refuses_other_dtypes(dtype: torch.dtype) -> None:
    join, stream = rg.ExactAdd(), torch.ones(2).to(dtype)
    for call in (lambda: join.enter(stream), lambda: join.apply(stream, stream), lambda: join.invert(stream, stream)):
        with pytest.raises(TypeError, match=r"float32 or float64 streams.*use .float\(\)"):
            call()


def test_the_limits_of_both_dtypes() -> None:
    assert rg.ExactAdd().limit(torch.float32) == 2048
    assert rg.ExactAdd().limit(torch.float64) == 2.0**40


class Turned(rg.Join):
    """Takes the layout of the output, not that of the target."""

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        return out[0] + target

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return -(out[0] - target)


class Rotated(rg.Join):
    """Reads a tensor of its own, in an operator that autocast runs in lower precision."""

    def __init__(self) -> None:
        self.turn = torch.linalg.qr(torch.randn(4, 4))[0]

    def apply(self, target: Tensor, *out: Tensor) -> Tensor:
        return target @ self.turn + out[0]

    def invert(self, target: Tensor, *out: Tensor) -> Tensor:
        return (target - out[0]) @ self.turn.T


def program_of(join: rg.Join, dtype: torch.dtype = torch.float64) -> tuple[list[rg.Update], dict[str, Tensor]]:
    class Turn(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

    updates = [rg.Update("ab"[i % 2], Turn(4, 4, dtype=dtype), "ba"[i % 2], join) for i in range(4)]
    return updates, {name: torch.randn(3, 2, 4, dtype=dtype, requires_grad=True) for name in "ab"}


def test_a_stream_keeps_its_layout_whatever_the_join_returns() -> None:
    updates, given = program_of(Turned())
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        out = rg.run(updates, given, policy=policy)
        loss = sum(leaf.sin().sum() for leaf in out.values())
        found.append(torch.autograd.grad(loss, [*given.values(), *updates[0].fn.parameters()]))  # type: ignore[attr-defined]
    torch.testing.assert_close(found[1], found[0])


def test_a_join_is_undone_under_the_autocast_of_the_forward() -> None:
    """What the join saves would have another dtype otherwise, and what it undoes another precision."""
    updates, given = program_of(Rotated(), torch.float32)
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        with torch.autocast("cpu", torch.bfloat16):
            out = rg.run(updates, given, policy=policy)
        loss = sum(leaf.sum() for leaf in out.values())
        found.append(torch.autograd.grad(loss, [*given.values()]))
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


def test_a_tensor_of_a_join_that_is_changed_in_place() -> None:
    join = Rotated()
    updates, given = program_of(join, torch.float32)
    out = rg.run(updates, given)
    join.turn.mul_(2)
    with pytest.raises(RuntimeError, match=r"update 3 .*: the tensor 'turn' of shape \(4, 4\) was changed in place"):
        out["a"].sum().backward()
