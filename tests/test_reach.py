"""What a callable can be seen to use."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import assert_same
from retrograd.reach import reach

HELD, NORM, NOISE = torch.ones(2), nn.BatchNorm1d(2), torch.Generator()
NORMS = [nn.BatchNorm1d(2)]


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
    assert found.own == set(map(id, found.modules))
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

    given = {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "ab"}
    found = []
    for policy in (rg.Keep(), rg.Reverse()):
        loss = rg.run([rg.Update("a", Noisy(), "b")], given, policy=policy)["a"].sum()
        found.append(torch.autograd.grad(loss, given["b"]))
    assert_same(found[1], found[0])


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


class Noisy(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return b + torch.randn(b.shape, generator=NOISE)


class ByItsBase(Noisy):
    def forward(self, b: Tensor) -> Tensor:
        return super().forward(b)


class InsideOfAFunction(nn.Module):
    def draw(self, b: Tensor) -> Tensor:
        return torch.randn(b.shape, generator=NOISE)

    def forward(self, b: Tensor) -> Tensor:
        return (lambda x: x + self.draw(x))(b)


class ByAnotherMethod(nn.Module):
    class Encoder(nn.Module):
        def encode(self, b: Tensor) -> Tensor:
            return b + torch.randn(b.shape, generator=NOISE)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.Encoder())

    def forward(self, b: Tensor) -> Tensor:
        return self.inner[0].encode(b)  # type: ignore[operator]


class ByItsCall(nn.Module):
    def __call__(self, b: Tensor) -> Tensor:
        return b + torch.randn(b.shape, generator=NOISE)


@pytest.mark.parametrize("kind", [Noisy, ByItsCall, ByItsBase, InsideOfAFunction, ByAnotherMethod])
def test_a_generator_is_found_through_what_a_method_calls(kind: type[nn.Module]) -> None:
    assert reach(kind(), {}).generators == [NOISE]


def test_a_tensor_in_place_of_a_parameter_is_found() -> None:
    layer = nn.Linear(2, 2)
    del layer.bias
    layer.bias = HELD
    found = reach(nn.Sequential(layer), {})
    assert found.tensors == [HELD]
    assert (vars(layer), "bias", HELD) in [each for each in found.variables if each[1] == "bias"]
