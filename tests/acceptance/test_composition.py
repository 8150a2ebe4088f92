"""Programs, recipes and everything that a reversible network is combined with: compile, checkpoint, export, nesting."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from networks import WIDTH, Plain, assert_same, differs, feed_forward, gradients, loss_of, pair, sequence, tokens


@pytest.fixture
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


compiles = [
    pytest.mark.usefixtures("_fresh_compiler"),
    # torch's own: inductor and dynamo use what torch deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def _train(forward: Any, x: Tensor, wanted: list[Tensor], steps: int = 2) -> list[list[Tensor]]:
    return [gradients(forward, wanted, x) for _ in range(steps)]


class TestCompile:
    pytestmark = compiles

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_compiled_f_and_g(self, dropout: float) -> None:
        net, x = sequence(2, dropout), tokens()
        wanted = [x, *net.parameters()]
        for block in net.blocks:
            for fn in block:
                fn.compile(backend="aot_eager")
        found = _train(net, x, wanted)
        for block in net.blocks:
            for fn in block:
                fn._compiled_call_impl = None
        assert_same(found, _train(Plain(net.blocks), x, wanted))

    def test_compiled_wrappers_of_f_and_g_with_a_keyword(self) -> None:
        blocks = [pair() for _ in range(2)]
        net = rg.ReversibleSequence([[torch.compile(fn, backend="aot_eager") for fn in block] for block in blocks])
        net, x, context = net.double(), tokens(), tokens()
        wanted = [x, context, *net.parameters()]
        found = gradients(net, wanted, x, context=context)
        assert_same(found, gradients(Plain(blocks), wanted, x, context=context))

    def test_compiled_f_and_g_with_inductor(self) -> None:
        net, x = rg.ReversibleSequence([(feed_forward(WIDTH), nn.Tanh())] * 2).double(), tokens()
        wanted = [x, *net.parameters()]
        expected = _train(Plain(net.blocks), x, wanted)
        net.blocks[0][0].compile()
        assert_same(_train(net, x, wanted), expected)

    @pytest.mark.parametrize("training", [True, False])
    def test_compile_of_the_whole_module(self, training: bool) -> None:
        net, x = rg.ReversibleSequence([(feed_forward(WIDTH), nn.Tanh())] * 2).double().train(training), tokens()
        wanted = [x, *net.parameters()]
        expected = _train(Plain(net.blocks).train(training), x, wanted)
        compiled = torch.compile(net, backend="aot_eager")
        assert_same(_train(compiled, x, wanted), expected)

    def test_compile_of_a_model_around(self) -> None:
        net, x = rg.ReversibleSequence([(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * 2).double(), tokens()
        head, tail = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        model, plain = nn.Sequential(head, net, tail), nn.Sequential(head, Plain(net.blocks), tail)
        wanted = [x, *model.parameters()]
        assert_same(_train(torch.compile(model, backend="aot_eager"), x, wanted), _train(plain, x, wanted))

    def test_compile_options_reach_the_fns(self) -> None:
        """Those given to torch.compile(model) cannot be seen from inside; the module has a place for them."""
        net, x = rg.ReversibleSequence([(nn.Linear(WIDTH, WIDTH), nn.Tanh())]).double(), tokens()
        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        net.compile_options = {"backend": backend}
        torch.compile(net, backend=backend)(x).sum().backward()
        assert any(torch._C._nn.linear in targets for targets in graphs)

    def test_compile_of_the_whole_module_compiles_the_fns_in_both_passes(self) -> None:
        compiled = []

        class Spy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                compiled.append(torch.compiler.is_compiling())
                return x.sin()

        net, x = rg.ReversibleSequence([(Spy(), nn.Tanh())]).double(), tokens()
        torch.compile(net, backend="aot_eager")(x).sum().backward()
        assert compiled == [True, True]

    def test_compile_without_grad(self) -> None:
        net, x = rg.ReversibleSequence([(nn.Linear(WIDTH, WIDTH), nn.Tanh())]).double(), tokens()
        with torch.no_grad():
            assert_same(torch.compile(net, backend="aot_eager")(x), Plain(net.blocks)(x))

    def test_without_grad_under_autocast_it_is_one_graph(self) -> None:
        net, x = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4))]), torch.randn(2, 4)
        whole = torch.compile(net, backend="aot_eager", fullgraph=True)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_same(whole(x), net(x))


class Nested(nn.Module):
    """A reversible network, and a choice that is remembered, inside a fn."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = rg.ReversibleSequence([(Choice(), feed_forward(WIDTH, dropout)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * rg.remember(lambda: torch.ones(1, dtype=x.dtype).bernoulli_(0.5) + 0.5)


class Choice(nn.Module):
    """Draws how to mix, once: a second draw would give another network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = rg.remember(lambda: torch.randperm(WIDTH))
        return self.linear(x)[..., order].sin()


class PlainNested(nn.Module):
    def __init__(self, nested: Nested) -> None:
        super().__init__()
        self.inner = Plain(nested.inner.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (torch.ones(1, dtype=x.dtype).bernoulli_(0.5) + 0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nested_reversible_inside_a_fn(dropout: float) -> None:
    net, x = rg.ReversibleSequence([(Nested(dropout), feed_forward(WIDTH)) for _ in range(2)]).double(), tokens()
    plain = Plain([(PlainNested(f), g) for f, g in net.blocks])
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(plain, wanted, x))


def test_nested_with_double_backward() -> None:
    net, x = rg.ReversibleSequence([(Nested(0.5), feed_forward(WIDTH))]).double(), tokens()
    plain = Plain([(PlainNested(f), g) for f, g in net.blocks])
    wanted = [x, *net.blocks[0][0].parameters()]

    def penalty(forward: nn.Module) -> Tensor:
        return torch.autograd.grad(loss_of(forward(x)), x, create_graph=True)[0]

    assert_same(gradients(penalty, wanted, net), gradients(penalty, wanted, plain))


def test_remember_takes_a_choice_once() -> None:
    taken = []

    def fn(b: Tensor) -> Tensor:
        def choose() -> Tensor:
            taken.append(rg.phase())
            return b.argsort(-1)

        return b.gather(-1, rg.remember(choose)).sin()

    x = tokens()
    found = gradients(lambda: rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": x, "b": x})["b"], [x])
    assert taken == [rg.Phase(0, "a", False), rg.Phase(1, "b", False)]
    assert_same(found, gradients(lambda: x + (x + x.sort().values.sin()).sort().values.sin(), [x]))


def test_remember_that_draws_random_numbers() -> None:
    """What is drawn after a remembered choice is replayed as well."""

    def choose() -> Tensor:
        return torch.randperm(WIDTH)

    def mix(b: Tensor, order: Tensor) -> Tensor:
        return functional.dropout(b[..., order].sin(), 0.5)

    x = tokens()
    updates = [rg.Update(target, lambda b: mix(b, rg.remember(choose)), source) for target, source in ("ab", "ba")]
    found = gradients(lambda: rg.run(updates, {"a": x, "b": x})["b"], [x])
    assert_same(found, gradients(lambda: x + mix(x + mix(x, choose()), choose()), [x]))


class Checkpointed(nn.Module):
    def __init__(self, fn: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.fn, self.reentrant = fn, reentrant

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        return checkpoint(self.fn, *args, use_reentrant=self.reentrant, **kwargs)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("where", "reentrant"),
    [("inside", False), ("around", False), ("both", False), ("inside", True), ("around", True)],
)
def test_checkpoint(where: str, reentrant: bool, dropout: float) -> None:
    blocks, x = [pair(dropout=dropout) for _ in range(2)], tokens()
    if where == "around":
        net = rg.ReversibleSequence(blocks).double()
    else:
        net = rg.ReversibleSequence(
            [[Checkpointed(fn, reentrant=reentrant) for fn in block] for block in blocks]
        ).double()
    wrapped = net if where == "inside" else Checkpointed(net, reentrant=reentrant)

    def all_gradients(forward: nn.Module) -> list[Tensor]:
        """With backward(): reentrant checkpoints refuse autograd.grad."""
        torch.manual_seed(7)
        x.grad = None
        net.zero_grad()
        loss_of(forward(x)).backward()
        return [x.grad, *(parameter.grad for parameter in net.parameters())]

    assert_same(all_gradients(wrapped), all_gradients(Plain(blocks)))


def test_checkpoint_around_each_of_two_networks() -> None:
    nets, x = [sequence(2, 0.3), sequence(2, 0.3)], tokens()
    wanted = [x, *(parameter for net in nets for parameter in net.parameters())]

    def through(first: nn.Module, second: nn.Module) -> Tensor:
        return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)

    found = gradients(through, wanted, *nets)
    first, second = (Plain(net.blocks) for net in nets)
    assert_same(found, gradients(lambda: second(first(x)), wanted))


def test_save_on_cpu_around_the_module() -> None:
    net, x = sequence(dropout=0.3), tokens()
    wanted = [x, *net.parameters()]
    expected = gradients(Plain(net.blocks), wanted, x)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(net, wanted, x)
    assert_same(found, expected)


def test_saved_tensor_hooks_around_the_module_see_only_the_streams() -> None:
    net, x = sequence(4), tokens()
    wanted = [x, *net.parameters()]
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = net(x)
    assert packed == [x.shape, x.shape]
    assert_same(list(torch.autograd.grad(loss_of(y), wanted)), gradients(Plain(net.blocks), wanted, x)[1:])


def test_save_on_cpu_inside_a_fn() -> None:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = feed_forward(WIDTH, 0.3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return self.fn(x)

    net, x = rg.ReversibleSequence([(Offloaded(), Offloaded()) for _ in range(2)]).double(), tokens()
    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(Plain(net.blocks), wanted, x))


Point = namedtuple("Point", ["near", "far"])


@dataclass
class Molecule:
    near: Tensor
    far: Tensor


pytree.register_dataclass(Molecule)

TREES: dict[str, tuple[Any, Any]] = {
    "dict": (lambda near, far: {"near": near, "far": far}, lambda tree: (tree["near"], tree["far"])),
    "list": (lambda near, far: [near, far], tuple),
    "tuple": (lambda near, far: (near, far), tuple),
    "namedtuple": (Point, tuple),
    "dataclass": (Molecule, lambda tree: (tree.near, tree.far)),
    "nested": (lambda near, far: {"deep": [near, {"er": far}]}, lambda t: (t["deep"][0], t["deep"][1]["er"])),
}


@pytest.mark.parametrize("kind", TREES)
def test_trees_of_tensors(kind: str) -> None:
    """Two tensors of unequal shapes in each stream, as in SE(3) networks."""
    build, take = TREES[kind]
    near = tokens()
    far = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(WIDTH, 3, dtype=torch.float64, requires_grad=True)

    def mix(near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        summary = near.mean(1, keepdim=True) @ weight
        return (far.mean(1, keepdim=True) @ weight.T + near).sin(), (far * summary).tanh()

    class Mix(nn.Module):
        def forward(self, tree: Any) -> Any:
            assert type(tree) is type(build(near, far))
            return build(*mix(*take(tree)))

    net = rg.ReversibleSequence([(Mix(), Mix()), (Mix(), Mix())])

    def plain() -> tuple[Tensor, Tensor]:
        a = b = (near, far)
        for _ in range(2):
            a = tuple(x + y for x, y in zip(a, mix(*b), strict=True))
            b = tuple(x + y for x, y in zip(b, mix(*a), strict=True))
        return tuple((x + y) / 2 for x, y in zip(a, b, strict=True))

    wanted = [near, far, weight]

    def flat(pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in pair])

    out = net(build(near, far))
    assert type(out) is type(build(near, far))
    assert_same(gradients(lambda: flat(take(net(build(near, far)))), wanted), gradients(lambda: flat(plain()), wanted))


def test_more_than_two_streams() -> None:
    """Two modalities that attend to each other, g and k crossed as in DESIGN.md."""
    f, g, j, k = (nn.Bilinear(WIDTH, WIDTH, WIDTH).double() for _ in range(4))
    video, audio = tokens(), tokens()

    def reversible() -> Tensor:
        updates = [
            rg.Update("x1", f, ("x2", "m2")),
            rg.Update("x2", lambda x1: k(x1, x1), "x1"),
            rg.Update("m1", j, ("m2", "x2")),
            rg.Update("m2", lambda m1: g(m1, m1), "m1"),
        ]
        out = rg.run(updates * 2, {"x1": video, "x2": video, "m1": audio, "m2": audio})
        return torch.cat([out[name] for name in ("x1", "x2", "m1", "m2")])

    def plain() -> Tensor:
        x1 = x2 = video
        m1 = m2 = audio
        for _ in range(2):
            x1 = x1 + f(x2, m2)
            x2 = x2 + k(x1, x1)
            m1 = m1 + j(m2, x2)
            m2 = m2 + g(m1, m1)
        return torch.cat([x1, x2, m1, m2])

    for network in (f, g, j, k):
        nn.init.normal_(network.weight, std=0.1)
    wanted = [video, audio, *(parameter for network in (f, g, j, k) for parameter in network.parameters())]
    assert_same(gradients(reversible, wanted), gradients(plain, wanted))


class Affines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), feed_forward(WIDTH, 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(x).tanh(), self.shift(x)


def test_affine_coupling() -> None:
    net, x = rg.ReversibleSequence([(Affines(), Affines()) for _ in range(3)], join=rg.Affine()).double(), tokens()

    def plain() -> Tensor:
        a = b = x
        for f, g in net.blocks:
            log_scale, shift = f(b)
            a = a * log_scale.exp() + shift
            log_scale, shift = g(a)
            b = b * log_scale.exp() + shift
        return (a + b) / 2

    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(plain, wanted))


def test_a_join_of_the_user() -> None:
    @dataclass(frozen=True)
    class Rotate(rg.Join):
        """Saves what it needs for its gradient, in `apply`."""

        def apply(self, target: Tensor, *out: Tensor) -> Tensor:
            return target.sinh().mul(2).asinh() + out[0].square()

        def invert(self, target: Tensor, *out: Tensor) -> Tensor:
            return (target - out[0].square()).sinh().div(2).asinh()

    f, x = feed_forward(WIDTH, 0.3).double(), tokens()
    updates = [rg.Update("a", f, "b", join=Rotate()), rg.Update("b", f, "a", join=Rotate())] * 2

    def reversible(policy: rg.Policy) -> Tensor:
        return rg.run(updates, {"a": x, "b": x}, policy=policy)["b"]

    wanted = [x, *f.parameters()]
    assert_same(gradients(reversible, wanted, rg.Reverse()), gradients(reversible, wanted, rg.Keep()))


def test_momentum() -> None:
    net, x = rg.Momentum([feed_forward(WIDTH, 0.3) for _ in range(4)], gamma=0.7).double(), tokens()

    def plain() -> Tensor:
        state, velocity = x, torch.zeros_like(x)
        for f in net.blocks:
            velocity = 0.7 * velocity + (1 - 0.7) * f(state)
            state = state + velocity
        return state

    wanted = [x, *net.parameters()]
    assert_same(gradients(net, wanted, x), gradients(plain, wanted))


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fn = feed_forward(WIDTH, 0.3)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return x + self.fn(x if shift is None else x + shift)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_conversion_of_a_plain_residual_network(depth: int) -> None:
    blocks, x, shift = nn.ModuleList(ResidualBlock() for _ in range(depth)).double(), tokens(), tokens()
    net = rg.Midpoint.from_residual(blocks)

    def plain() -> Tensor:
        states = [x, blocks[0](x, shift)]
        for block in blocks[1:]:
            states.append(states[-2] + 2 * (block(states[-1], shift) - states[-1]))
        return states[-1]

    wanted = [x, shift, *blocks.parameters()]
    assert_same(gradients(net, wanted, x, shift=shift), gradients(plain, wanted))


@pytest.mark.parametrize("policy", [rg.Keep(), rg.Reverse()], ids=str)
def test_policy_per_update(policy: rg.Policy) -> None:
    """A kept run of updates in the middle is not replayed, and reversing goes on before it."""
    replayed, x, weight = [], tokens(), torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)

    def fn(b: Tensor) -> Tensor:
        if rg.phase().replaying:
            replayed.append(rg.phase().update)
        return (b * weight).sin()

    policies = [None, None, policy, policy, None]
    updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], policy=own) for i, own in enumerate(policies)]
    found = gradients(lambda: rg.run(updates, {"a": x, "b": x})["a"], [x, weight])

    def plain() -> Tensor:
        streams = {"a": x, "b": x}
        for i in range(5):
            streams["ab"[i % 2]] = streams["ab"[i % 2]] + (streams["ba"[i % 2]] * weight).sin()
        return streams["a"]

    assert_same(found, gradients(plain, [x, weight]))
    assert replayed == ([4, 1, 0] if policy == rg.Keep() else [4, 3, 2, 1, 0])


def _invertible() -> rg.ReversibleSequence:
    blocks = [(feed_forward(WIDTH // 2, 0.3), feed_forward(WIDTH // 2, 0.3)) for _ in range(3)]
    return rg.ReversibleSequence(blocks, split=-1, merge="concat").double().eval()


def test_public_inverse() -> None:
    net, x = _invertible(), tokens()
    y = net(x)
    assert differs([y], [x])
    assert_same(net.inverse(y), x)
    with torch.no_grad():
        assert_same(net.inverse(y), x.detach())


@pytest.mark.parametrize("join", [rg.Add(), rg.Scale(0.9, 0.5), rg.Affine()], ids=str)
def test_invert_undoes_every_join(join: rg.Join) -> None:
    def fn(b: Tensor) -> Any:
        return (b.sin(), b.cos()) if join == rg.Affine() else b.sin()

    updates = [rg.Update("a", fn, "b", join), rg.Update("b", fn, "a", join)] * 3
    start = {"a": tokens(), "b": tokens()}
    assert_same(rg.invert(updates, rg.run(updates, start)), start)


def test_inverse_is_differentiable() -> None:
    net, y = _invertible(), tokens()

    def plain() -> Tensor:
        a, b = y.chunk(2, -1)
        for f, g in reversed(net.blocks):
            b = b - g(a)
            a = a - f(b)
        return torch.cat((a, b), -1)

    wanted = [y, *net.parameters()]
    assert_same(gradients(net.inverse, wanted, y), gradients(plain, wanted))


@pytest.mark.parametrize("length", [4, 5], ids=["reversed", "kept"])
def test_layer_dropout_with_reverse_above(length: int) -> None:
    """Five tokens: above 4 the blocks are reversed, up to 5 they are kept. Both train, and drop the same blocks."""
    net, x = sequence(6, layer_dropout=0.5, reverse_above=length), tokens()
    replays = []
    for f, _ in net.blocks:
        f.register_forward_hook(lambda *_: replays.append(rg.phase().replaying))

    def plain() -> Tensor:
        draws = torch.rand(6).tolist()
        return Plain([block for block, draw in zip(net.blocks, draws, strict=True) if draw >= 0.5])(x)

    torch.manual_seed(7)
    loss_of(net(x)).backward()
    found = [parameter.grad for parameter in net.parameters()]
    assert replays.count(True) == (replays.count(False) if length == 4 else 0)
    for f, _ in net.blocks:
        f._forward_hooks.clear()
    net.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss_of(plain()).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    assert 0 < sum(gradient is None for gradient in expected) < len(expected)  # some dropped, some not
    assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
    assert_same([g for g in found if g is not None], [g for g in expected if g is not None])


def test_layer_dropout_is_off_in_eval_mode() -> None:
    net, x = sequence(3, layer_dropout=0.9).eval(), tokens()
    assert_same(gradients(net, [x], x), gradients(Plain(net.blocks).eval(), [x], x))


def test_layer_dropout_never_drops_everything() -> None:
    net, x = sequence(2, layer_dropout=0.999), tokens()
    assert_same(gradients(net, [x], x), gradients(Plain(net.blocks[:1]), [x], x))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_of_the_eval_forward(grad: bool) -> None:
    net, x = sequence(2, dropout=0.5).eval(), tokens(requires_grad=False)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(net, (x,))
    assert_same(program.module()(x), Plain(net.blocks).eval()(x))


def test_a_copy_of_the_inputs_is_not_needed() -> None:
    """Outputs and inputs may be the same tensors for streams that no update reads or writes."""
    x, other = tokens(), tokens()
    out = rg.run([rg.Update("a", torch.sin, "b")], {"a": x, "b": x, "idle": other})
    assert out["idle"] is other


def test_updates_are_described_anew_at_each_call() -> None:
    class Growing(rg.Reversible):
        def __init__(self) -> None:
            super().__init__()
            self.fns = nn.ModuleList([feed_forward(WIDTH)])

        def updates(self, scale: float) -> Any:
            for index, fn in enumerate(self.fns):
                yield rg.Update("ab"[index % 2], fn, "ba"[index % 2], rg.Scale(1.0, scale))

    net, x = Growing().double(), tokens()
    net({"a": x, "b": x}, scale=1.0)
    net.fns.append(copy.deepcopy(net.fns[0]))
    first, second = net.fns
    wanted = [x, *net.parameters()]
    found = gradients(lambda: net({"a": x, "b": x}, scale=0.5)["b"], wanted)
    assert_same(found, gradients(lambda: x + 0.5 * second(x + 0.5 * first(x)), wanted))
