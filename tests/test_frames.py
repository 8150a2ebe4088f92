"""`phase` and `remember`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd as rg
from networks import assert_same


def run_fn(fn: Any, policy: rg.Policy = rg.Reverse()) -> tuple[Tensor, Tensor]:
    """The output of `a += fn(b)`, and b."""
    given = {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "ab"}
    return rg.run([rg.Update("a", fn, "b")], given, policy=policy)["a"].sum(), given["b"]


def test_phase_outside_a_program_is_none() -> None:
    assert rg.phase() is None
    run_fn(torch.sin)[0].backward()
    assert rg.phase() is None


def test_phase_of_a_program_inside_a_fn() -> None:
    seen: list[Any] = []

    def inner(b: Tensor) -> Tensor:
        seen.append(rg.phase())
        return b.sin()

    def outer(b: Tensor) -> Tensor:
        updates = [rg.Update("y", torch.cos, "x"), rg.Update("x", inner, "y")]
        out = rg.run(updates, {"x": b, "y": b})["x"]
        seen.append(rg.phase())
        return out

    loss, _ = run_fn(outer)
    assert seen == [rg.Phase(1, "x", False), rg.Phase(0, "a", False)]
    seen.clear()
    loss.backward()
    # The replay of the outer fn runs the inner program forward; then that is reversed too.
    assert seen == [rg.Phase(1, "x", False), rg.Phase(0, "a", True), rg.Phase(1, "x", True)]


def test_phase_of_a_kept_update_and_without_grad() -> None:
    seen = []

    def fn(b: Tensor) -> Tensor:
        seen.append(rg.phase())
        return b

    run_fn(fn, rg.Keep())[0].backward()
    with torch.no_grad():
        run_fn(fn)
    assert seen == [rg.Phase(0, "a", False)] * 2


def test_remember_outside_a_program_computes_without_grad() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not rg.remember(lambda: x * 2).requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Keep()], ids=str)
def test_remember_returns_the_very_same_values_in_order(policy: rg.Policy) -> None:
    seen: list[tuple[object, object]] = []

    def fn(b: Tensor) -> Tensor:
        seen.append((rg.remember(object), rg.remember(object)))
        return b.sin()

    run_fn(fn, policy)[0].backward()
    assert len(seen) == (2 if policy == rg.Reverse() else 1)
    assert seen[0][0] is not seen[0][1]
    assert all(pair[0] is seen[0][0] and pair[1] is seen[0][1] for pair in seen)


def test_remember_in_two_backward_passes() -> None:
    taken = []

    def fn(b: Tensor) -> Tensor:
        return b.sin() * rg.remember(lambda: taken.append(1) or len(taken))

    loss, b = run_fn(fn)
    first = torch.autograd.grad(loss, b, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, b)[0], first[0])
    assert taken == [1]


def test_remember_inside_a_program_inside_a_fn() -> None:
    taken = []

    def inner(b: Tensor) -> Tensor:
        return b.sin() * rg.remember(lambda: taken.append(1) or len(taken))

    def outer(b: Tensor) -> Tensor:
        return rg.run([rg.Update("x", inner, "y")] * 2, {"x": b, "y": b})["x"]

    loss, b = run_fn(outer)
    (found,) = torch.autograd.grad(loss, b)
    assert taken == [1, 1]
    assert_same(found, 1 + 3 * b.cos())


def test_a_compute_that_fails() -> None:
    def fn(b: Tensor) -> Tensor:
        rg.remember(lambda: 1 / 0)
        return b

    with pytest.raises(ZeroDivisionError) as caught:
        run_fn(fn)
    assert caught.value.__notes__ == ["retrograd: in update 0 (target 'a', fn fn), forward"]
    assert rg.phase() is None
    assert torch.is_grad_enabled()


def test_remember_more_often_in_the_replay_says_how_often() -> None:
    def fn(b: Tensor) -> Tensor:
        for _ in range(3 if rg.phase().replaying else 2):
            rg.remember(lambda: 1)
        return b.sin()

    message = r"update 0 \(target 'a'\) calls remember\(\) more often in its replay than in its forward \(2 times\)"
    with pytest.raises(RuntimeError, match=message):
        run_fn(fn)[0].backward()


def test_remember_less_often_in_the_replay_is_refused_too() -> None:
    def fn(b: Tensor) -> Tensor:
        if not rg.phase().replaying:
            rg.remember(lambda: 1)
        return (b * rg.remember(lambda: 2)).sin()

    with pytest.raises(RuntimeError, match="remember"):
        run_fn(fn)[0].backward()


def test_remember_that_draws_from_a_generator_of_the_user() -> None:
    generator = torch.Generator()

    def fn(b: Tensor) -> Tensor:
        return b[rg.remember(lambda: torch.randperm(4, generator=generator))].sin()

    loss, b = run_fn(fn)
    assert_same(torch.autograd.grad(loss, b)[0], b.cos())


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(save="output")], ids=repr)
def test_what_is_remembered_inside_a_remembered_choice_is_part_of_it(policy: rg.Policy) -> None:
    calls = []

    def inner(b: Tensor) -> Tensor:
        calls.append("inner")
        return b.argmax(-1, keepdim=True)

    def fn(b: Tensor) -> Tensor:
        outer = rg.remember(lambda: rg.remember(lambda: inner(b)) + 10)
        after = rg.remember(lambda: torch.tensor(2.0))
        return b.sin() * outer * after

    loss, b = run_fn(fn, policy)
    found = torch.autograd.grad(loss, b)[0]
    assert calls == ["inner"]
    assert_same(found, b.cos() * (b.argmax() + 10) * 2)
