"""What a call of fn depended on: what is found, noted, put back and restored; `phase` and `remember`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import assert_same
from retrograd.reach import reach
from retrograd.replay import Call, _is_dtensor
from retrograd.surroundings import Surroundings

HELD, NORM, NOISE = torch.ones(2), nn.BatchNorm1d(2), torch.Generator()
NORMS = [nn.BatchNorm1d(2)]


def streams() -> dict[str, Tensor]:
    return {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "ab"}


def run_fn(fn: Any, policy: rg.Policy = rg.Reverse(), **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The output of `a += fn(b)`, and b."""
    given = streams()
    return rg.run([rg.Update("a", fn, "b", kwargs=kwargs)], given, policy=policy)["a"].sum(), given["b"]


# What a function can be seen to use


class Holder:
    def __init__(self, *held: Any) -> None:
        self.held = list(held)

    def __call__(self, b: Tensor) -> Tensor:
        return b

    def method(self, b: Tensor) -> Tensor:
        return b


def uses_globals(b: Tensor) -> Tensor:
    return NORM(b * HELD + torch.rand(2, generator=NOISE))


def calls_another(b: Tensor) -> Tensor:
    return uses_globals(b)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


@functools.lru_cache
def cached(b: Tensor) -> Tensor:
    return b * HELD * torch.rand(2, generator=NOISE) * NORM(b)


def by_closure() -> Any:
    held, norm, noise = HELD, NORM, NOISE
    return lambda b: norm(b * held + torch.rand(2, generator=noise))


def by_default(b: Tensor, held: Any = HELD, *, norm: Any = NORM, noise: Any = NOISE) -> Tensor:
    return b


EVERYTHING = (HELD, NORM, NOISE)
WAYS: dict[str, Any] = {
    "closure": by_closure(),
    "globals": uses_globals,
    "a function it calls": calls_another,
    "defaults": by_default,
    "partial": functools.partial(torch.add, *EVERYTHING[:1], norm=EVERYTHING[1:]),
    "partial of partial": functools.partial(functools.partial(lambda *_: None, HELD), *EVERYTHING[1:]),
    "bound method": Holder(*EVERYTHING).method,
    "callable object": Holder(*EVERYTHING),
    "object in a closure": (lambda holder: lambda b: holder(b))(Holder(*EVERYTHING)),
    "wrapped": decorated(uses_globals),
    "cached": cached,
    "function in a list": Holder([uses_globals]),
}


@pytest.mark.parametrize("fn", WAYS.values(), ids=WAYS)
def test_a_function_is_followed(fn: Any) -> None:
    found = reach(fn, {})
    assert [id(tensor) for tensor in found.tensors] == [id(HELD)]
    assert found.modules == [NORM]
    assert found.generators == [NOISE]
    assert not found.own


@pytest.mark.parametrize(
    "value",
    [
        [*EVERYTHING],
        (*EVERYTHING,),
        {*EVERYTHING},
        {"x": HELD, "y": {"z": [NORM, NOISE]}},
        Holder(*EVERYTHING),
        functools.partial(uses_globals),
    ],
    ids=["list", "tuple", "set", "dict", "object", "partial"],
)
def test_keywords_are_followed(value: Any) -> None:
    for found in (reach(torch.sin, {"value": value}), reach(nn.Identity(), {"value": value})):
        assert [id(tensor) for tensor in found.tensors] == [id(HELD)]
        assert NORM in found.modules
        assert found.generators == [NOISE]


def test_each_thing_is_found_once() -> None:
    found = reach(lambda b, again=HELD: (again, HELD), {"x": HELD, "y": [HELD, HELD]})
    assert len(found.tensors) == 1


def test_what_refers_to_itself_is_followed_once() -> None:
    ring: list[Any] = [HELD]
    ring.append(ring)
    assert len(reach(torch.sin, {"ring": ring}).tensors) == 1


@pytest.mark.parametrize(("depth", "seen"), [(1, 1), (4, 1), (5, 0), (9, 0)])
def test_the_search_stops_at_a_depth(depth: int, seen: int) -> None:
    value: Any = HELD
    for _ in range(depth):
        value = [value]
    assert len(reach(torch.sin, {"value": value}).tensors) == seen


def test_the_nearest_way_counts() -> None:
    inner = [HELD]
    assert len(reach(torch.sin, {"value": [[[[inner]]], inner]}).tensors) == 1


def test_modules_and_classes_named_in_code_are_not_followed() -> None:
    found = reach(lambda b: (torch.sin(b), Holder, pytest), {})
    assert (found.tensors, found.modules, found.generators) == ([], [], [])


def test_a_variable_that_is_not_there_yet() -> None:
    def fn(b: Tensor) -> Tensor:
        return later(b)

    assert reach(fn, {}).modules == []
    later = NORM
    assert reach(fn, {}).modules == [NORM]


class Held(nn.Module):
    """Holds what a module may hold besides parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.held, self.inner = NOISE, HELD, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_module("nothing", None)
        self.register_buffer("none", None)


def test_a_module_is_searched_whole() -> None:
    module = Held()
    found = reach(module, {})
    assert found.own == found.modules
    assert found.modules == list(module.modules())
    assert [id(tensor) for tensor in found.tensors] == [id(HELD)]
    assert found.generators == [NOISE]


def test_attributes_of_a_module_in_a_closure_are_not_watched() -> None:
    """The closure may not use them, and they may well change."""
    module = Held()
    found = reach(lambda b: module.inner(b), {})
    assert found.tensors == []
    assert found.generators == [NOISE]  # these are recorded only where they move


# What is not found: a replay would draw other numbers, or count a batch twice, without a word.


class Slots:
    __slots__ = ("norm",)


class Unregistered(nn.Module):
    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.held = list(held)

    def forward(self, b: Tensor) -> Tensor:
        return self.held[0](b)


def through_a_slot(norm: nn.Module) -> Any:
    holder = Slots()
    holder.norm = norm
    return lambda b: holder.norm(b)


def through_a_hook(norm: nn.Module) -> Any:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, out: norm(out))
    return module


def through_a_patched_forward(norm: nn.Module) -> Any:
    module = nn.Identity()
    module.forward = lambda b: norm(b)  # type: ignore[method-assign, assignment]
    return module


def through_a_global_list(norm: nn.Module) -> Any:
    NORMS[0] = norm
    return lambda b: NORMS[0](b)


def through_an_inner_function(norm: nn.Module) -> Any:
    globals()["LATER"] = norm
    return lambda b: (lambda: LATER(b))()  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    "hide",
    [
        through_a_slot,
        through_a_hook,
        through_a_patched_forward,
        through_a_global_list,
        pytest.param(Unregistered, id="through_an_unregistered_module"),
        through_an_inner_function,
    ],
)
def test_a_norm_that_is_hard_to_see_counts_once(hide: Any) -> None:
    norm = nn.BatchNorm1d(4)
    x = torch.randn(3, 4, requires_grad=True)
    rg.run([rg.Update("a", hide(norm), "b")], {"a": x, "b": x})["a"].sum().backward()
    assert norm.num_batches_tracked == 1


def test_generators_in_a_list_of_a_module() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generators = [torch.Generator()]

        def forward(self, b: Tensor) -> Tensor:
            return (b * torch.rand(4, generator=self.generators[0], dtype=b.dtype)).sin()

    given = streams()
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        loss = rg.run([rg.Update("a", Noisy(), "b")], given, policy=policy)["a"].sum()
        found.append(torch.autograd.grad(loss, given["b"]))
    assert_same(found[1], found[0])


# A call, and its replay


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
    assert still.random == []
    moving = call(lambda b: b, generator=NOISE)
    moving.forward(lambda: torch.rand(1, generator=NOISE), [])
    assert [generator for generator, _, _ in moving.random] == [NOISE]


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


# phase and remember


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


# What torch has no public name for


def test_the_dictionaries_of_a_module_are_what_it_computes_with() -> None:
    module, x = nn.BatchNorm1d(2).eval(), torch.ones(1, 2)
    assert list(module._parameters) == ["weight", "bias"]
    assert list(module._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    module._parameters["weight"] = torch.full((2,), 3.0)  # a plain tensor: refused by the public way
    module._buffers["running_mean"] = torch.full((2,), -1.0)
    torch.testing.assert_close(module(x), torch.full((1, 2), 6.0), rtol=1e-4, atol=0.0)
    assert module.weight is module._parameters["weight"]


def test_children_and_what_is_not_there_are_listed_as_none() -> None:
    module = Held()
    assert list(module._modules) == ["inner", "nothing"]
    assert module._modules["nothing"] is None
    assert module._buffers == {"none": None}
    assert nn.Linear(2, 2, bias=False)._parameters["bias"] is None


def test_modules_of_torch_hold_no_tensors_of_their_own() -> None:
    """`Reached.walk` does not look at the attributes of modules from torch.nn."""
    built = [nn.LSTM(2, 2), nn.MultiheadAttention(2, 1), nn.TransformerEncoderLayer(2, 1), nn.BatchNorm1d(2)]
    for module in (part for whole in built for part in whole.modules()):
        own = [value for value in vars(module).values() if isinstance(value, (Tensor, torch.Generator))]
        assert own == [], type(module).__name__


def test_dtensors_are_known_by_name() -> None:
    assert torch.distributed.is_available()
    from torch.distributed.tensor import DTensor

    assert _is_dtensor(torch.Tensor._make_subclass(type("Mine", (DTensor,), {}), torch.ones(1)))
    assert not _is_dtensor(torch.ones(1))
    assert not _is_dtensor(None)


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
