"""The base class: a module is its updates, what it takes and returns is for a subclass to say, and it can be copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import assert_same, gradients


class Mine(rg.Reversible):
    """Takes a pair of tensors, returns them joined, and has keywords of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.f, self.g = nn.Linear(3, 3), nn.Linear(3, 3)

    def updates(self, *, gain: float, times: int = 1) -> Iterator[rg.Update]:
        for _ in range(times):
            yield rg.Update("a", self.f, "b", rg.Scale(1.0, gain))
            yield rg.Update("b", self.g, "a")

    def split(self, x: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"a": x[0], "b": x[1]}

    def merge(self, streams: Mapping[str, Tensor]) -> Tensor:
        return torch.cat((streams["a"], streams["b"]))

    def unmerge(self, y: Tensor) -> Mapping[str, Tensor]:
        return self.split(y.chunk(2))

    def unsplit(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return streams["a"], streams["b"]


def inputs() -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))


def test_a_subclass_with_its_own_keywords_inputs_and_outputs() -> None:
    net, x = Mine().double(), inputs()

    def plain() -> Tensor:
        a, b = x
        for _ in range(3):
            a = a + 0.5 * net.f(b)
            b = b + net.g(a)
        return torch.cat((a, b))

    wanted = [*x, *net.parameters()]
    assert_same(gradients(net, wanted, x, gain=0.5, times=3), gradients(plain, wanted))


def test_its_inverse() -> None:
    net, x = Mine().double(), inputs()
    assert_same(net.inverse(net(x, gain=0.5, times=3), gain=0.5, times=3), x)


def test_run_and_invert_take_and_return_streams() -> None:
    net, (a, b) = Mine().double(), inputs()
    out = net.run({"b": b, "a": a}, gain=2.0)
    assert list(out) == ["b", "a"]
    assert_same(out["a"], a + 2 * net.f(b))
    assert_same(net.invert(out, gain=2.0), {"b": b, "a": a})


def test_invert_refuses_what_draws_from_a_generator_of_the_user() -> None:
    generator, (a, b) = torch.Generator(), inputs()
    updates = [rg.Update("a", lambda b: b * torch.rand(1, generator=generator), "b")]
    out = rg.run(updates, {"a": a, "b": b})
    with pytest.raises(RuntimeError, match="draws random numbers"):
        rg.invert(updates, out)


@pytest.mark.parametrize(("keywords", "message"), [({}, "gain"), ({"gain": 1.0, "gian": 1.0}, "gian")])
def test_keywords_of_updates_are_checked_by_python(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Mine()(inputs(), **keywords)


@pytest.mark.parametrize("how", ["call", "run", "inverse", "invert"])
def test_without_updates(how: str) -> None:
    class Undescribed(rg.Reversible):
        pass

    net: Any = Undescribed()
    call = net if how == "call" else getattr(net, how)
    with pytest.raises(NotImplementedError, match=r"Undescribed must define updates\(\)"):
        call({"a": torch.ones(1)}, mask=None)


def test_the_base_class_takes_and_returns_streams() -> None:
    class Plain(rg.Reversible):
        def updates(self) -> list[rg.Update]:
            return [rg.Update("a", torch.sin, "b")]

    start = {"a": torch.ones(1), "b": torch.ones(1)}
    out = Plain()(start)
    assert_same(out, {"a": 1 + torch.ones(1).sin(), "b": torch.ones(1)})
    assert_same(Plain().inverse(out), start)
    assert start["a"] == 1


def test_a_tensor_where_streams_are_needed() -> None:
    with pytest.raises(TypeError, match="streams"):
        Mine().run(torch.ones(1), gain=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["reverse", rg.Keep, 0, False], ids=repr)
def test_a_policy_that_is_none(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"policy must be Reverse\(\), Keep\(\), Offload\(\) or Auto\(budget\), not "):
        Mine(policy=policy)


def test_the_default_policy_is_to_reverse() -> None:
    assert Mine().policy == rg.Reverse()
    assert Mine(policy=rg.Keep()).policy == rg.Keep()


def test_policy_for_decides_for_each_call() -> None:
    replays = []

    class Long(Mine):
        def policy_for(self, streams: Mapping[str, Tensor]) -> rg.Policy:
            return rg.Reverse() if len(streams["a"]) > 2 else rg.Keep()

    net = Long()
    net.f.register_forward_hook(lambda *_: replays.append(rg.phase().replaying))
    for length in (2, 3):
        replays.clear()
        net((torch.randn(length, 3), torch.randn(length, 3)), gain=1.0).sum().backward()
        assert replays == ([False] if length == 2 else [False, True])


def test_the_module_holds_nothing_but_what_a_subclass_registers() -> None:
    assert list(Mine().state_dict()) == ["f.weight", "f.bias", "g.weight", "g.bias"]


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_leave_compiled_functions_behind(way: Any) -> None:
    net, x = Mine(policy=rg.Reverse(anchor_every=1)).double(), inputs()
    net.compiled[1] = (net.f, lambda x: x)  # a function that cannot be pickled
    other = way(net)
    assert other.compiled == {}
    assert list(net.compiled) == [1]
    assert other.policy == net.policy
    assert_same(other(x, gain=1.0), net(x, gain=1.0))
    assert other.f.weight is not net.f.weight


def test_a_shallow_copy_does_not_share_compiled_functions() -> None:
    net = Mine()
    other = copy.copy(net)
    other.compiled[1] = (None, None)
    assert net.compiled == {}
    assert other.f is net.f


def test_compile_options_belong_to_the_class_until_they_are_set() -> None:
    net = Mine()
    net.compile_options = {"backend": "eager"}
    assert Mine().compile_options == {}


@pytest.mark.parametrize("policy", ["reverse", rg.Keep, None])
def test_what_is_no_policy_is_refused_where_it_is_set(policy):
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())])
    with pytest.raises(TypeError, match=r"policy must be Reverse\(\)"):
        net.policy = policy
    assert net.policy == rg.Reverse()


def test_a_second_input_without_a_keyword():
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())])
    with pytest.raises(TypeError, match="as keywords, such as mask=mask"):
        net(torch.zeros(2), torch.zeros(2))
