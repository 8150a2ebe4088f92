"""What a plain module uses is known from the call before, unless anything has changed."""

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg
from retrograd.plain import _known, known

FACTOR = 2


class Plain(nn.Module):
    """All that a plain module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
        self.scale, self.shape, self.name, self.mask = 0.5, (1, 4), "plain", None
        self.act, self.also, self.more = functional.relu, torch.tanh, nn.Sequential()

    def forward(self, b: Tensor) -> Tensor:
        out = self.act(self.first(b)) * self.scale * FACTOR
        return self.more(self.second(out if self.mask is None else out * self.mask))


class Twice(nn.Linear):
    def forward(self, b: Tensor) -> Tensor:
        return 2 * super().forward(b)


CHANGES = {
    "a parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.eye(4))),
    "a parameter gone": lambda m: setattr(m.first, "bias", None),
    "a parameter more": lambda m: m.register_parameter("another", nn.Parameter(torch.ones(1))),
    "a submodule": lambda m: setattr(m, "first", nn.Linear(4, 4)),
    "a submodule of a submodule": lambda m: m.second.__setitem__(1, nn.Linear(4, 4)),
    "a submodule more": lambda m: m.second.append(nn.Tanh()),
    "a submodule where there was none": lambda m: m.more.append(nn.Tanh()),
    "the mode": lambda m: m.eval(),
    "the mode of a submodule": lambda m: m.second[0].eval(),
    "an attribute": lambda m: setattr(m, "scale", 0.25),
    "a tensor for none": lambda m: setattr(m, "mask", torch.ones(4)),
    "a tensor of the same value": lambda m: setattr(m, "scale", torch.tensor(0.5)),
    "an attribute more": lambda m: setattr(m, "table", [torch.ones(1)]),
    "a function with a closure": lambda m: setattr(m, "act", lambda x: x * m.scale),
    "a hook": lambda m: m.first.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda m: m.second.register_forward_pre_hook(lambda module, args: None),
    "a buffer": lambda m: m.register_buffer("count", torch.zeros(())),
    "another forward": lambda m: setattr(m.first, "forward", types.MethodType(lambda self, x: x, m.first)),
    "another class": lambda m: setattr(m.first, "__class__", Twice),
    "another dict": lambda m: setattr(m.first, "__dict__", m.first.__dict__.copy()),
    "the slope of a layer": lambda m: setattr(m.second[0], "eps", 1.0),
    "other registries": lambda m: m.first.__dict__.update(_parameters=dict(m.first._parameters)),
}


def test_it_is_found_once() -> None:
    module = Plain()
    found = known(module)
    assert found is not None
    assert known(module) is found
    assert found.below == [module.first, module.second, *module.second, module.more]
    assert found.weights == list(module.parameters())
    assert known(copy.deepcopy(module)) is not found


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    module = Plain()
    found = known(module)
    CHANGES[change](module)
    again = known(module)
    assert again is not found
    assert again is None or again.weights == list(module.parameters())


def test_a_global_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Plain()
    found = known(module)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert known(module) not in (None, found)
    monkeypatch.setitem(globals(), "FACTOR", torch.ones(()))
    assert known(module) is None


def test_what_may_go_again_does_not_count_for_good() -> None:
    module = Plain()
    handle = module.first.register_forward_hook(lambda module, args, out: None)
    assert known(module) is None
    handle.remove()
    assert known(module) is not None
    torch.func.functional_call(module, {"first.weight": torch.eye(4)}, torch.ones(4))
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    seen = []
    module.act = torch.tanh
    module.first.forward = types.MethodType(lambda self, x: seen.append(known(module)) or x, module.first)
    torch.func.functional_call(module, weights, torch.ones(4))
    assert seen == [None]
    del module.first.forward
    assert known(module) is not None


class Holding(nn.Module):
    def __init__(self, thing: object) -> None:
        super().__init__()
        self.thing = thing

    def forward(self, b: Tensor) -> Tensor:
        return b.sin()


@pytest.mark.parametrize(
    "thing", [torch.ones(1), [1], {"a": 1}, torch.Generator(), types.SimpleNamespace(), lambda x: x, nn.BatchNorm1d(4)]
)
def test_modules_that_are_not_plain(thing: object) -> None:
    assert known(Holding(thing)) is None


def test_functions_are_not_known() -> None:
    assert known(torch.sin) is None
    assert known(lambda b: b) is None


def test_it_lets_go_of_the_module() -> None:
    module = Plain()
    known(module)
    key, there = id(module), weakref.ref(module)
    assert key in _known
    del module
    gc.collect()
    assert there() is None
    assert key not in _known


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in ("another forward", "another class")])
@pytest.mark.parametrize("known_before", [True, False])
def test_changes_between_forward_and_backward_do_not_reach_the_replay(change: str, known_before: bool) -> None:
    def grads(policy: rg.Policy) -> list[Tensor]:
        torch.manual_seed(0)
        module = Plain()
        if known_before:
            known(module)
        weights = list(module.parameters())
        x = torch.randn(3, 4, requires_grad=True)
        out = rg.run([rg.Update("a", module, "b"), rg.Update("b", module, "a")], {"a": x, "b": x}, policy=policy)
        CHANGES[change](module)
        return list(torch.autograd.grad(out["a"].sum() + out["b"].square().sum(), [x, *weights]))

    for seen, expected in zip(grads(rg.Reverse()), grads(rg.Keep()), strict=True):
        torch.testing.assert_close(seen, expected)


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, b: Tensor) -> Tensor:
        return self.linear(b).sin()


class Named(nn.Module):
    """Runs its networks in the order in which they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({"p": Sine(), "q": Sine()})

    def forward(self, b: Tensor) -> Tensor:
        for network in self.networks.values():
            b = network(b)
        return b


ORDERS = {
    "the first gone": lambda m: m.networks.pop("p"),
    "another for the first": lambda m: (m.networks.pop("p"), m.networks.update({"z": Sine()})),
    "another order": lambda m: m.networks.update({"p": m.networks.pop("p")}),
    "one more": lambda m: m.networks.update({"z": Sine()}),
    "all new": lambda m: (m.networks.clear(), m.networks.update({"x": Sine(), "y": Sine()})),
    "weight norm": lambda m: nn.utils.weight_norm(m.networks["p"].linear),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("change", ORDERS)
@pytest.mark.parametrize("known_before", [True, False])
def test_submodules_are_put_back_in_their_order_and_again_as_they_were(change: str, known_before: bool) -> None:
    def run(policy: rg.Policy) -> tuple[Tensor, list[str]]:
        torch.manual_seed(0)
        module = Named()
        if known_before:
            known(module)
        x = torch.randn(3, 4, requires_grad=True)
        out = rg.run([rg.Update("a", module, "b"), rg.Update("b", module, "a")], {"a": x, "b": x}, policy=policy)
        ORDERS[change](module)
        after = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
        (grad,) = torch.autograd.grad(out["a"].sum() + out["b"].square().sum(), x)
        assert after == [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
        return grad, after

    (seen, names), (expected, same) = run(rg.Reverse()), run(rg.Keep())
    assert names == same
    torch.testing.assert_close(seen, expected)


def test_a_module_that_holds_itself_is_let_go() -> None:
    module = Sine()
    module.me = module
    assert known(module) is None
    there = weakref.ref(module)
    del module
    gc.collect()
    assert there() is None


def test_numbers_of_a_module_that_is_not_plain_are_put_back_too() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop, self.scale = nn.BatchNorm1d(4), nn.Dropout(0.5), 0.5

        def forward(self, b: Tensor) -> Tensor:
            return self.drop(self.norm(b)).sin() * self.scale

    def run(policy: rg.Policy) -> Tensor:
        torch.manual_seed(0)
        module, x = Normed(), torch.randn(3, 4, requires_grad=True)
        assert known(module) is None
        out = rg.run([rg.Update("a", module, "b"), rg.Update("b", module, "a")], {"a": x, "b": x}, policy=policy)
        module.scale, module.drop.p = 2.0, 0.1
        (grad,) = torch.autograd.grad(out["a"].sum() + out["b"].square().sum(), x)
        assert (module.scale, module.drop.p) == (2.0, 0.1)
        return grad

    torch.testing.assert_close(run(rg.Reverse()), run(rg.Keep()))


@pytest.mark.parametrize("where", [lambda net: net[0], lambda net: net[0].weight], ids=["layer", "weight"])
def test_what_leads_back_to_a_module_is_not_held(where: Callable[[nn.Module], Any]) -> None:
    """An attribute of a layer or of a weight: whoever knew it would keep the module alive."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    where(net).owner = [net]
    assert known(net) is None
    rg.run([rg.Update("a", net, "b")], {"a": torch.randn(2), "b": torch.randn(2)})["a"].sum().backward()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
