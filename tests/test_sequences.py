"""The recipes against plain loops in float64, and what they refuse. (DualModality: test_dual_modality.py.)"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from networks import WIDTH, Plain, assert_same, feed_forward, gradients, loss_of, sequence, tokens
from retrograd.sequences import Residual


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def pairs(depth: int = 2) -> list[tuple[nn.Module, nn.Module]]:
    return [(linear(), linear()) for _ in range(depth)]


class Keyed(nn.Module):
    """Multiplies by the keywords it gets, and writes down which."""

    def __init__(self, log: list[Any], name: str) -> None:
        super().__init__()
        self.log, self.name = log, name

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.log.append((self.name, sorted(kwargs)))
        return x.sin() * sum(kwargs.values(), start=1.0)


class Block(nn.Module):
    """A residual block with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = feed_forward(WIDTH)

    def forward(self, x: Tensor, shift: Any = 0.0) -> Tensor:
        return x + self.inner(x) * (1 + shift)


# ReversibleSequence: what goes in and what comes out


@pytest.mark.parametrize(
    ("split", "merge"),
    [
        ("duplicate", "mean"),
        ("duplicate", "sum"),
        (-1, "mean"),
        (-1, "sum"),
        (-1, "concat"),
        (2, "concat"),
        (0, "concat"),
    ],
)
def test_split_and_merge(split: Any, merge: Any) -> None:
    width = WIDTH // 2 if split in (-1, 2) else WIDTH
    blocks = [(feed_forward(width), feed_forward(width)) for _ in range(3)]
    net, x = rg.ReversibleSequence(blocks, split=split, merge=merge).double(), tokens()

    def plain() -> Tensor:
        a, b = (x, x) if split == "duplicate" else x.chunk(2, split)
        for f, g in net.blocks:
            a = a + f(b)
            b = b + g(a)
        return {"mean": (a + b) / 2, "sum": a + b, "concat": torch.cat((a, b), 0 if split == 0 else -1)}[merge]

    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(plain, wanted))


@pytest.mark.parametrize("split", [0, -1])
@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_inverse_of_halves(split: int, kind: str) -> None:
    net = rg.ReversibleSequence([(nn.Tanh(), nn.GELU())] * 3, split=split, merge="concat")
    if kind == "dict":
        net = rg.ReversibleSequence([(OnDict(), OnDict())] * 3, split=split, merge="concat")
    x: Any = tokens() if kind == "tensor" else {"x": tokens(), "y": tokens()[:, :2]}
    y = net(x)
    assert_same(net.inverse(y), x)
    moved = y - x if kind == "tensor" else y["x"] - x["x"]
    assert moved.abs().max() > 0.1


class OnDict(nn.Module):
    """Returns its dictionary in another order."""

    def forward(self, tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": tree["y"].sin(), "x": tree["x"].cos()}


@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("split", ["duplicate", 0])
def test_inverse_of_what_lost_a_stream(split: Any, merge: Any) -> None:
    net, x = sequence(2, split=split, merge=merge), tokens()
    message = rf"merge='{merge}' does not keep both streams, .*use run\(\) and invert\(\).*merge='concat'"
    with pytest.raises(ValueError, match=message):
        net.inverse(net(x))
    start = net.split(x)
    assert_same(net.invert(net.run(start)), start)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lambda: rg.Momentum([linear()] * 3, 0.9), r"Momentum returns one of its two streams.*use run\(\) and invert"),
        (lambda: rg.Midpoint([linear()] * 3), r"Midpoint returns one of its two streams.*use run\(\) and invert"),
    ],
    ids=["Momentum", "Midpoint"],
)
def test_inverse_of_a_stack(recipe: Any, message: str) -> None:
    net, x = recipe().double(), tokens()
    with pytest.raises(ValueError, match=message):
        net.inverse(net(x))
    start = net.split(x)
    assert_same(net.invert(net.run(start)), start)


def test_odd_sizes_and_missing_dimensions_are_refused_by_the_call() -> None:
    with pytest.raises(ValueError, match=r"split=1: size 5 of dimension 1 is odd.*pad it"):
        rg.ReversibleSequence(pairs(), split=1, merge="concat")(torch.ones(2, 5, WIDTH))
    with pytest.raises(ValueError, match=r"split=3: a tensor of shape \(2, 5, 6\) has no dimension 3"):
        rg.ReversibleSequence(pairs(), split=3, merge="concat")(torch.ones(2, 5, WIDTH))


def test_no_blocks_at_all() -> None:
    x = tokens()
    assert_same(rg.ReversibleSequence([], layer_dropout=0.5)(x), x)
    assert_same(rg.Momentum([])(x), x)
    assert_same(rg.Midpoint([])(x), x)


# ReversibleSequence: what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "half"}, "split must be 'duplicate' or the dimension to halve, not 'half'"),
        ({"split": None}, "split must be .* not None"),
        ({"split": True}, "split must be .* not True"),
        ({"split": 1.0}, "split must be .* not 1.0"),
        ({"merge": "max"}, "merge must be 'mean', 'sum' or 'concat', not 'max'"),
        ({"merge": "concat"}, "merge='concat' puts halves together; it needs split=<the dimension to halve>"),
        ({"layer_dropout": 1.0}, "layer_dropout must be a probability below 1, not 1.0"),
        ({"layer_dropout": -0.1}, "layer_dropout must be .* not -0.1"),
        ({"layer_dropout": float("nan")}, "layer_dropout must be .* not nan"),
        ({"reverse_above": -1}, "reverse_above must be a length, 0 or more, not -1"),
        ({"reverse_above": 1.5}, "reverse_above must be .* not 1.5"),
        ({"route": {"mask": "h"}}, r"route\['mask'\] must be '', 'f', 'g' or 'fg' .* not 'h'"),
        ({"route": {"mask": "f, g"}}, r"route\['mask'\] must be .* not 'f, g'"),
        ({"route": {"mask": ["f", "x"]}}, r"route\['mask'\] must be .* not 'x'"),
        ({"route": {"mask": ["f", None]}}, r"route\['mask'\] must be .* not None"),
        ({"route": {"mask": ["f"]}}, r"route\['mask'\] has 1 entries for 2 blocks"),
        ({"route": {"mask": ["f"] * 3}}, r"route\['mask'\] has 3 entries for 2 blocks"),
        ({"route": {"mask": []}}, r"route\['mask'\] has 0 entries for 2 blocks"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rg.ReversibleSequence(pairs(), **options)


@pytest.mark.parametrize(
    "options",
    [{"route": ["f"]}, {"route": {"mask": 3}}, {"route": {"mask": None}}, {"layer_dropout": "0.5"}],
    ids=str,
)
def test_options_of_the_wrong_type(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=name):
        rg.ReversibleSequence(pairs(), **options)


def test_reverse_above_is_no_switch() -> None:
    with pytest.raises(ValueError, match="reverse_above"):
        rg.ReversibleSequence(pairs(), reverse_above=True)


@pytest.mark.parametrize(
    ("block", "seen"),
    [
        ((linear(),), r"\['Linear'\]"),
        ((linear(),) * 3, r"\['Linear', 'Linear', 'Linear'\]"),
        ((linear(), torch.sin), r"\['Linear', 'builtin_function_or_method'\]"),
        ((linear(), None), r"\['Linear', 'NoneType'\]"),
        (linear(), "Linear"),
        ({"f": linear(), "g": linear()}, "dict"),
        ((), r"\[\]"),
    ],
)
def test_blocks_that_are_no_pairs(block: Any, seen: str) -> None:
    with pytest.raises(ValueError, match=rf"block 1 must be a pair \(f, g\) of modules, not {seen}"):
        rg.ReversibleSequence([*pairs(1), block])


@pytest.mark.parametrize("kind", [tuple, list, nn.ModuleList, lambda block: nn.Sequential(*block)])
def test_blocks_may_be_any_of_these(kind: Any) -> None:
    block = pairs(1)[0]
    assert [*rg.ReversibleSequence(kind(block) for _ in range(2)).blocks[1]] == [*block]


@pytest.mark.parametrize(
    "build",
    [lambda join: rg.ReversibleSequence(pairs(), join=join), lambda join: rg.Midpoint([linear()], join=join)],
    ids=["ReversibleSequence", "Midpoint"],
)
@pytest.mark.parametrize("join", [None, "add", rg.Add], ids=repr)
def test_joins_that_are_none(build: Any, join: Any) -> None:
    with pytest.raises(TypeError, match=r"join must be a Join such as Add\(\), not "):
        build(join)


# Keywords


def test_routes_per_block() -> None:
    log: list[Any] = []
    blocks = [(Keyed(log, f"f{i}"), Keyed(log, f"g{i}")) for i in range(3)]
    net = rg.ReversibleSequence(blocks, route={"m": ["f", "", "fg"], "c": "g", "unused": "f"})
    x, m, c = tokens(), tokens(), tokens()
    found = gradients(net, [x, m, c], x, m=m, c=c)
    expected = [("f0", ["m"]), ("g0", ["c"]), ("f1", []), ("g1", ["c"]), ("f2", ["m"]), ("g2", ["c", "m"])]
    assert log == [*expected, *reversed(expected)]  # the replay gets the same

    def plain() -> Tensor:
        a = x + x.sin() * (1 + m)
        b = x + a.sin() * (1 + c)
        a = a + b.sin()
        b = b + a.sin() * (1 + c)
        a = a + b.sin() * (1 + m)
        b = b + a.sin() * (1 + c + m)
        return (a + b) / 2

    assert_same(found, gradients(plain, [x, m, c]))


def test_routes_overrule_signatures() -> None:
    net = rg.ReversibleSequence([(Block(), Block())], route={"shift": "g"}).double()
    f, g = net.blocks[0]
    x = tokens()
    assert_same(net(x, shift=1.0), (x + f(x) + x + g(x + f(x), shift=1.0)) / 2)


@pytest.mark.parametrize("route", [{"mask": ""}, {"mask": ["", ""]}, {}, {"context": "fg"}], ids=str)
def test_a_keyword_that_no_route_takes_anywhere(route: Any) -> None:
    with pytest.raises(TypeError, match=r"ReversibleSequence: no network takes the keyword 'mask'; .*route="):
        rg.ReversibleSequence(pairs(), route=route)(tokens().float(), mask=None)


@pytest.mark.parametrize("recipe", [rg.Momentum, rg.Midpoint])
def test_a_keyword_that_no_network_of_a_stack_takes(recipe: Any) -> None:
    with pytest.raises(TypeError, match=rf"{recipe.__name__}: no network takes the keyword 'mask'"):
        recipe([linear()])(torch.ones(1, WIDTH), mask=None)


def test_one_network_that_names_it_is_enough() -> None:
    net, x = rg.ReversibleSequence([(linear(), linear()), (linear(), Block())]).double(), tokens()
    assert (net(x, shift=1.0) - net(x)).abs().max() > 1e-3


# Layer dropout and reverse_above


def test_inverse_in_training_with_layer_dropout() -> None:
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())], split=-1, merge="concat", layer_dropout=0.1)
    y = net.eval()(tokens())
    assert net.inverse(y).shape == y.shape
    with pytest.raises(RuntimeError, match=r"layer_dropout drops other blocks at each call; use eval mode"):
        net.train().inverse(y)


def test_layer_dropout_drops_blocks_as_often_as_it_should() -> None:
    net = sequence(200, layer_dropout=0.25)
    kept = sum(1 for _ in net.updates()) // 2
    assert 120 <= kept <= 180  # 150 +- 5 standard deviations
    dropped = {update.fn for update in net.updates()} ^ {fn for block in net.blocks for fn in block}
    for f, g in net.blocks:
        assert (f in dropped) == (g in dropped)  # whole blocks


def test_layer_dropout_inside_a_fn_drops_the_same_blocks_in_the_replay() -> None:
    inner = sequence(8, layer_dropout=0.5)
    net, x = rg.ReversibleSequence([(inner, feed_forward(WIDTH))] * 2).double(), tokens()
    kept = rg.ReversibleSequence(net.blocks, policy=rg.Keep())
    inner.policy = rg.Keep()
    torch.manual_seed(7)
    loss_of(kept(x)).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    assert any(gradient is None for gradient in expected)
    net.zero_grad()
    inner.policy = rg.Reverse()
    torch.manual_seed(7)
    loss_of(net(x)).backward()
    assert_same([p.grad for p in net.parameters()], expected)


@pytest.mark.parametrize(("length", "reversed_"), [(1, False), (3, False), (4, True), (9, True)])
def test_reverse_above_counts_dimension_one(length: int, reversed_: bool) -> None:
    net = sequence(1, reverse_above=3, policy=rg.Reverse(anchor_every=7))
    x = torch.ones(20, length, 30)
    expected = net.policy if reversed_ else rg.Keep()
    assert net.policy_for({"a": x, "b": x}) == expected
    assert net.policy_for({"a": x[:, :1], "b": {"deep": [torch.ones(99), x]}}) == expected  # the longest of all


def test_reverse_above_of_streams_without_a_length() -> None:
    net = sequence(1, reverse_above=3)
    assert net.policy_for({"a": torch.ones(99), "b": torch.ones(99)}) == rg.Keep()
    assert sequence(1).policy_for({"a": torch.ones(1), "b": torch.ones(1)}) == rg.Reverse()


def test_reverse_above_is_about_the_input_also_where_its_length_is_halved() -> None:
    replays = []
    net = rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())], split=1, merge="concat", reverse_above=4)
    net.blocks[0][0].register_forward_hook(lambda *_: replays.append(rg.phase().replaying))
    net(torch.randn(2, 6, 3, requires_grad=True)).sum().backward()
    assert replays == [False, True]


# Momentum and Midpoint


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_gamma_out_of_range(gamma: float) -> None:
    with pytest.raises(ValueError, match=rf"gamma must lie between 0 and 1, not {gamma}"):
        rg.Momentum([linear()], gamma)


@pytest.mark.parametrize("recipe", [rg.Momentum, rg.Midpoint])
def test_blocks_of_a_stack_are_modules(recipe: Any) -> None:
    with pytest.raises(TypeError, match=r"block 1 must be a module, not .*sin"):
        recipe([linear(), torch.sin])
    with pytest.raises(TypeError, match="block 0 must be a module"):
        recipe(pairs())


def test_midpoint_needs_a_join_that_can_weigh() -> None:
    with pytest.raises(TypeError, match="Affine cannot weigh its output"):
        rg.Midpoint([linear()], join=rg.Affine())


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_midpoint(depth: int, gain: float) -> None:
    net, x = rg.Midpoint([feed_forward(WIDTH) for _ in range(depth)], join=rg.Scale(1.0, gain)).double(), tokens()

    def plain() -> Tensor:
        states = [x, x + gain * net.blocks[0](x)]
        for f in net.blocks[1:]:
            states.append(states[-2] + 2 * gain * f(states[-1]))
        return states[-1]

    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(plain, wanted))


def test_midpoint_of_one_residual_block_is_that_block() -> None:
    block, x = Block().double(), tokens()
    net = rg.Midpoint.from_residual([block])
    wanted = [x, *block.parameters()]
    assert_same(gradients(net, wanted, x, shift=0.5), gradients(block, wanted, x, shift=0.5))


def test_midpoint_from_residual_passes_its_options_on() -> None:
    net = rg.Midpoint.from_residual([Block()], join=rg.Scale(1.0, 0.5), policy=rg.Keep())
    assert net.policy == rg.Keep()
    assert net.joins == (rg.Scale(1.0, 0.5), rg.Scale(1.0, 1.0))


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_momentum_from_residual(gamma: float) -> None:
    blocks, x = nn.ModuleList(Block() for _ in range(3)).double(), tokens()
    net = rg.Momentum.from_residual(blocks, gamma, policy=rg.Reverse(anchor_every=2))
    assert net.policy == rg.Reverse(anchor_every=2)

    def plain() -> Tensor:
        state, velocity = x, torch.zeros_like(x)
        for block in blocks:
            velocity = gamma * velocity + (1 - gamma) * (block(state, shift=0.5) - state)
            state = state + velocity
        return state

    wanted = [x, *blocks.parameters()]
    assert_same(gradients(net, wanted, x, shift=0.5), gradients(plain, wanted))


@pytest.mark.parametrize("recipe", [rg.Momentum, rg.Midpoint])
def test_stacks_of_trees(recipe: Any) -> None:
    net, x = recipe([OnDict()] * 3), tokens()
    out = net({"x": x, "y": x})
    x_alone, y_alone = recipe([Cosine()] * 3)(x), recipe([Sine()] * 3)(x)
    assert_same(out, {"x": x_alone, "y": y_alone})


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


def test_residual_of_a_tree() -> None:
    x = tokens()
    assert_same(Residual(OnDict())({"x": x, "y": x}), {"x": x.cos() - x, "y": x.sin() - x})


# Copies and checkpoints

RECIPES: dict[str, Any] = {
    "ReversibleSequence": lambda: rg.ReversibleSequence(
        pairs(), merge="sum", route={"m": ["f", "g"]}, layer_dropout=0.1, reverse_above=3, join=rg.Scale(0.9)
    ),
    "DualModality": lambda: rg.DualModality([(linear(), linear(), linear(), linear())], ["self"]),
    "Momentum": lambda: rg.Momentum([linear(), linear()], 0.8, policy=rg.Reverse(anchor_every=2)),
    "Momentum.from_residual": lambda: rg.Momentum.from_residual([Block()]),
    "Midpoint": lambda: rg.Midpoint([linear(), linear()], join=rg.ExactAdd()),
    "Midpoint.from_residual": lambda: rg.Midpoint.from_residual([Block()]),
}
KEYS = {
    "ReversibleSequence": [f"blocks.{i}.{j}.{name}" for i in range(2) for j in range(2) for name in ("weight", "bias")],
    "DualModality": [f"blocks.0.{j}.{name}" for j in range(4) for name in ("weight", "bias")],
    "Momentum": ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"],
    "Midpoint": ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"],
    "Momentum.from_residual": [f"blocks.0.module.inner.{i}.{name}" for i in (0, 1, 4) for name in ("weight", "bias")],
    "Midpoint.from_residual": [f"blocks.0.module.inner.{i}.{name}" for i in (0, 1, 4) for name in ("weight", "bias")],
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@each_recipe
def test_the_keys_of_a_checkpoint_are_a_promise(recipe: str) -> None:
    assert list(RECIPES[recipe]().state_dict()) == KEYS[recipe]


@each_recipe
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_of_each_recipe(recipe: str, way: Any) -> None:
    net = RECIPES[recipe]()
    x = torch.randn(2, 5, WIDTH)
    inputs = (x, x[:, :3]) if recipe == "DualModality" else (x,)
    other = way(net)
    results = []
    for each in (net, other):
        torch.manual_seed(3)
        results.append(each(*inputs))
    assert_same(results[1], results[0])
    assert other.policy == net.policy
    assert not {id(p) for p in net.parameters()} & {id(p) for p in other.parameters()}


def test_a_checkpoint_of_the_plain_network_loads() -> None:
    plain = Plain(pairs())
    net = rg.ReversibleSequence(pairs())
    net.load_state_dict(plain.state_dict())
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(net(x), plain(x))


LAYOUTS: dict[str, Any] = {
    "every other": lambda: torch.randn(2, 4, 2 * WIDTH, dtype=torch.float64)[..., ::2],
    "expanded": lambda: torch.randn(4, WIDTH, dtype=torch.float64).expand(2, 4, WIDTH),
    "transposed": lambda: torch.randn(2, WIDTH, 4, dtype=torch.float64).transpose(1, 2),
    "one token": lambda: torch.randn(1, WIDTH, 1, dtype=torch.float64).transpose(1, 2),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(anchor_every=1), rg.Reverse(save="output")], ids=repr)
def test_inputs_that_are_not_dense(make: Any, policy: rg.Policy) -> None:
    """A reconstruction is dense. Linear layers fold the dimensions of what is, and save it in another shape."""
    net, x = rg.ReversibleSequence(pairs(), policy=policy).double(), make().requires_grad_()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.pairs()), wanted, x))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_halves_of_a_longer_input(dim: int) -> None:
    net = rg.ReversibleSequence(pairs(), split=dim, merge="concat").double()
    shape = [2, 4, WIDTH]
    shape[dim] *= 2
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    net.policy = rg.Keep()
    expected = gradients(net, [x, *net.parameters()], x)
    net.policy = rg.Reverse()
    assert_same(gradients(net, [x, *net.parameters()], x), expected)
