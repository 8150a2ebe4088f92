"""What a call of fn depended on: what is noted, put back and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from networks import assert_same
from retrograd.bindings import is_dtensor
from retrograd.replay import Call
from retrograd.surroundings import Surroundings


def call(fn: Any, **kwargs: Any) -> Call:
    return Call(2, rg.Update("a", fn, "b", kwargs=kwargs), Surroundings([]))


def test_a_replay_sees_what_the_forward_saw_and_leaves_no_trace() -> None:
    module, generator = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.Generator()
    frozen = module[0].weight.requires_grad_(False)
    x = torch.randn(3, 2)

    def look() -> tuple[Any, ...]:
        draw = torch.rand(1, generator=generator).item(), torch.rand(1).item()
        count = module[1].num_batches_tracked.item()
        module(x)
        return draw, count, module.training, frozen.requires_grad, module[0].bias

    forward = call(module, generator=generator)
    then, replayable = forward.forward(look, [])
    assert replayable
    module.eval()
    frozen.requires_grad_(True)
    module[0].bias = nn.Parameter(torch.zeros(2))
    torch.rand(3, generator=generator)
    before = module.state_dict(), generator.get_state(), torch.get_rng_state()
    again = forward.replay(look)
    assert again[:4] == then[:4]
    assert again[4] is then[4]
    assert (module.training, frozen.requires_grad) == (False, True)
    assert module[0].bias is not then[4]
    assert_same(module.state_dict(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_generators_that_stand_still_are_not_recorded() -> None:
    still = call(lambda b: b, generator=torch.Generator())
    still.forward(lambda: None, [])
    assert [whither for _, _, whither in still.random] == [None, None]
    noise = torch.Generator()
    moving = call(lambda b: b, generator=noise)
    moving.forward(lambda: torch.rand(1, generator=noise), [])
    assert [generator for generator, _, whither in moving.random if whither is not None] == [noise]


def test_a_replay_that_draws_otherwise() -> None:
    draws = iter([1, 2])
    noted = call(lambda b: b)
    noted.forward(lambda: torch.rand(next(draws)), [])
    state = torch.get_rng_state()
    message = r"update 2 \(target 'a', fn <lambda>\) draws other random numbers in its replay .*policy=Keep\(\)"
    with pytest.raises(RuntimeError, match=message):
        noted.replay(lambda: torch.rand(next(draws)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("which", "named"),
    [
        ("weight", "the parameter 'weight' of BatchNorm1d of shape (2,)"),
        ("running_mean", "the buffer 'running_mean' of BatchNorm1d of shape (2,)"),
        ("keyword", "its keyword 'context' of shape (5,)"),
    ],
)
def test_what_changed_is_named(which: str, named: str) -> None:
    module, context = nn.BatchNorm1d(2).eval(), torch.ones(5)
    noted = call(module, other=None, context={"deep": context})
    noted.forward(lambda: None, [])
    with torch.no_grad():
        (context if which == "keyword" else getattr(module, which)).add_(1)
    with pytest.raises(RuntimeError) as caught:
        noted.replay(lambda: None)
    assert f"update 2 (target 'a', fn BatchNorm1d): {named} was changed in place between forward" in str(caught.value)


def test_a_captured_tensor_that_the_fn_itself_changes() -> None:
    counter = torch.zeros(1)
    message = r"update 2 .*: fn changes a captured tensor of shape \(1,\) in place, and a replay would change it again"
    with pytest.raises(RuntimeError, match=message):
        call(lambda b: counter).forward(lambda: counter.add_(1), [])


def test_what_changed_is_named_beside_an_array() -> None:
    context = torch.ones(5)
    noted = call(torch.sin, array=pytest.importorskip("numpy").ones(3), context=context)
    noted.forward(lambda: None, [])
    context.add_(1)
    with pytest.raises(RuntimeError, match="its keyword 'context'"):
        noted.replay(lambda: None)


def test_the_traceback_names_the_update_and_the_pass() -> None:
    def fail() -> None:
        raise ArithmeticError("as told")

    noted = call(torch.sin)
    with pytest.raises(ArithmeticError) as forward:
        noted.forward(fail, [])
    with pytest.raises(ArithmeticError) as replayed:
        noted.replay(fail)
    assert forward.value.__notes__ == ["retrograd: in update 2 (target 'a', fn sin), forward"]
    assert replayed.value.__notes__ == ["retrograd: in update 2 (target 'a', fn sin), replayed in the backward"]


def test_a_join_that_draws_does_not_disturb_the_next_update():
    class Noisy(rg.Join):
        def apply(self, target, *out):
            torch.rand(())
            return target + out[0]

        def invert(self, target, *out):
            return target - out[0]

    def dropped(x):
        return torch.nn.functional.dropout(x * x, 0.5)

    x = torch.randn(32, requires_grad=True)
    updates = [rg.Update("a", dropped, "b", Noisy()), rg.Update("b", dropped, "a")]
    rg.run(updates, {"a": x, "b": x})["b"].sum().backward()


def test_weights_that_are_drawn_in_the_forward_do_not_disturb_the_next_update():
    net = rg.ReversibleSequence([(torch.nn.Dropout(), torch.nn.LazyLinear(4)), (torch.nn.Dropout(), torch.nn.Tanh())])
    net(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_an_attribute_that_was_bound_anew_is_put_back() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.context = nn.Linear(4, 4).double(), torch.ones(4, dtype=torch.float64)

        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return self.linear(b) * self.context

    net, scale = Conditioned(), nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        x, losses = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_(), []
        for context in (scale.detach() * 3, scale * 5, scale * 7):  # as in a step that gathers gradients
            net.context = context
            losses.append(rg.run([rg.Update("a", net, "b")], {"a": x, "b": x + 1}, policy=policy)["a"].square().sum())
        found.append(torch.autograd.grad(sum(losses), [x, scale, *net.parameters()]))
        assert net.context is context
    assert_same(found[1], found[0])


def test_variables_of_a_closure_are_put_back() -> None:
    linear = nn.Linear(4, 4).double()
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        x, losses = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_(), []
        for context in (torch.ones(4), torch.arange(4.0), torch.full((4,), 2.0)):
            program = [rg.Update("a", lambda b: linear(b) * context, "b")]  # noqa: B023 - that is the point
            losses.append(rg.run(program, {"a": x, "b": x + 1}, policy=policy)["a"].square().sum())
        found.append(torch.autograd.grad(sum(losses), [x, *linear.parameters()]))
        assert context[0] == 2
    assert_same(found[1], found[0])


# What torch has no public name for


def test_dtensors_are_known_by_name() -> None:
    assert torch.distributed.is_available()
    from torch.distributed.tensor import DTensor

    assert is_dtensor(torch.Tensor._make_subclass(type("Mine", (DTensor,), {}), torch.ones(1)))
    assert not is_dtensor(torch.ones(1))
    assert not is_dtensor(None)


def test_a_weight_is_named_beside_keywords_that_have_no_memory() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, b: torch.Tensor, adjacent: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.sparse.mm(adjacent, b))

    module, x = Graph(), torch.randn(4, 4, requires_grad=True)
    kwargs = {"adjacent": torch.eye(4).to_sparse(), "nothing": torch.zeros(0)}
    out = rg.run([rg.Update("a", module, "b", kwargs=kwargs)], {"a": x, "b": x})
    with torch.no_grad():
        module.inner.weight.mul_(2)
    with pytest.raises(RuntimeError, match="the parameter 'weight' of Linear of shape"):
        out["a"].sum().backward()
