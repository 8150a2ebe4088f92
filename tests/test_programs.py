"""Random programs: whatever the streams, joins and policies, gradients are those of plain autograd."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd as rg


class Subtract(rg.Join):
    def apply(self, target, *out):
        return target - out[0]

    def invert(self, target, *out):
        return target + out[0]


class Mix(nn.Module):
    """From any streams to the structure of any target, through a matrix for each pair of tensors."""

    def __init__(self, sources: list, target, parts: int, dropout: float) -> None:
        super().__init__()
        widths_in = [leaf.shape[-1] for source in sources for leaf in pytree.tree_leaves(source)]
        widths_out = [leaf.shape[-1] for leaf in pytree.tree_leaves(target)] * parts
        self.weights = nn.ParameterList(
            nn.ParameterList(nn.Parameter(torch.randn(i, o, dtype=torch.double) * 0.3) for i in widths_in)
            for o in widths_out
        )
        self.structure, self.parts, self.dropout = pytree.tree_structure(target), parts, nn.Dropout(dropout)

    def forward(self, *sources, scale: Tensor | None = None):
        leaves = [leaf for source in sources for leaf in pytree.tree_leaves(source)]
        out = []
        for row in self.weights:
            total = torch.stack([self.dropout(leaf @ weight) for leaf, weight in zip(leaves, row, strict=True)]).sum(0)
            out.append(torch.tanh(total if scale is None else total * scale))
        size = len(out) // self.parts
        trees = [pytree.tree_unflatten(out[i * size : (i + 1) * size], self.structure) for i in range(self.parts)]
        return trees[0] if self.parts == 1 else tuple(trees)


@dataclass
class Program:
    updates: list[rg.Update]
    streams: dict
    policy: rg.Policy
    leaves: list[Tensor]


numbers = st.floats(0.5, 2.0)
joins = st.one_of(
    st.just(rg.Add()), st.just(rg.Affine()), st.just(Subtract()), st.builds(rg.Scale, keep=numbers, gain=numbers)
)
policies = st.one_of(
    st.just(rg.Reverse()),
    st.just(rg.Keep()),
    st.just(rg.Offload()),
    st.builds(rg.Reverse, anchor_every=st.integers(1, 4), graphed=st.booleans()),
    st.builds(rg.Reverse, anchor_every=st.none() | st.integers(1, 4), save=st.just("output")),
)


@st.composite
def programs(draw, dropout: float = 0.0) -> Program:
    torch.manual_seed(draw(st.integers(0, 1000)))

    def tensor() -> Tensor:
        return torch.randn(2, draw(st.integers(1, 3)), dtype=torch.double).requires_grad_(draw(st.booleans()))

    shapes = st.sampled_from([tensor, lambda: {"x": tensor(), "y": [tensor()]}, lambda: (tensor(), tensor())])
    names = "abcdef"[: draw(st.integers(2, 6))]
    streams = {name: draw(shapes)() for name in names}
    scale = torch.rand(1, dtype=torch.double).requires_grad_()
    updates: list[rg.Update] = []
    for _ in range(draw(st.integers(1, 10))):
        again = draw(st.booleans()) and updates
        if again:  # the same network once more: shared weights
            updates.append(draw(st.sampled_from(updates)))
            continue
        target = draw(st.sampled_from(names))
        sources = draw(st.lists(st.sampled_from([n for n in names if n != target]), min_size=1, max_size=3))
        join = draw(joins)
        fn = Mix([streams[name] for name in sources], streams[target], join.parts, dropout)
        kwargs = {"scale": scale} if draw(st.booleans()) else {}
        updates.append(rg.Update(target, fn, sources, join, kwargs, draw(st.one_of(st.none(), policies))))
    weights = [p for update in updates for p in update.fn.parameters()]
    leaves = [leaf for leaf in pytree.tree_leaves(streams) if leaf.requires_grad]
    return Program(updates, streams, draw(policies), [*leaves, scale, *weights])


def plainly(program: Program) -> dict:
    """The same program in three lines that know nothing of the engine."""
    streams = dict(program.streams)
    for update in program.updates:
        out = update.fn(*(streams[name] for name in update.sources), **update.kwargs)
        out = out if update.join.parts > 1 else (out,)
        streams[update.target] = pytree.tree_map(update.join.apply, streams[update.target], *out)
    return streams


def gradients(streams: dict, leaves: list[Tensor], **kwargs) -> list[Tensor]:
    loss = sum((leaf.sin() * (index + 1)).sum() for index, leaf in enumerate(pytree.tree_leaves(streams)))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, **kwargs)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@many
@given(programs())
def test_gradients_equal_plain_autograd(program):
    if not any(leaf.requires_grad for leaf in pytree.tree_leaves(plainly(program))):
        return
    expected = gradients(plainly(program), program.leaves)
    assert_close(gradients(rg.run(program.updates, program.streams, policy=program.policy), program.leaves), expected)


@many
@given(programs(dropout=0.4))
def test_dropout_is_replayed(program):
    torch.manual_seed(7)
    expected = plainly(program)
    if not any(leaf.requires_grad for leaf in pytree.tree_leaves(expected)):
        return
    torch.manual_seed(7)
    got = rg.run(program.updates, program.streams, policy=program.policy)
    after = torch.get_rng_state()
    assert_close(gradients(got, program.leaves), gradients(expected, program.leaves))
    assert torch.equal(torch.get_rng_state(), after)


@settings(many, max_examples=60)
@given(programs())
def test_second_derivatives_equal_plain_autograd(program):
    def second(streams: dict) -> list[Tensor]:
        first = gradients(streams, program.leaves, create_graph=True)
        penalty = sum((g**2).sum() for g in first)
        grads = torch.autograd.grad(penalty, program.leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(program.leaves, grads, strict=True)]

    if not any(leaf.requires_grad for leaf in pytree.tree_leaves(plainly(program))):
        return
    expected = second(plainly(program))
    assert_close(second(rg.run(program.updates, program.streams, policy=program.policy)), expected)


@many
@given(programs())
def test_invert_undoes_run(program):
    out = rg.run(program.updates, program.streams, policy=program.policy)
    back = rg.invert(program.updates, out, policy=program.policy)
    assert list(back) == list(program.streams)
    assert_close(pytree.tree_leaves(back), pytree.tree_leaves(program.streams))


@many
@given(programs())
def test_invert_has_the_gradients_of_its_own_formula(program):
    def backwards(streams: dict) -> dict:
        for update in reversed(program.updates):
            out = update.fn(*(streams[name] for name in update.sources), **update.kwargs)
            out = out if update.join.parts > 1 else (out,)
            streams = {**streams, update.target: pytree.tree_map(update.join.invert, streams[update.target], *out)}
        return streams

    expected = backwards(program.streams)
    if not any(leaf.requires_grad for leaf in pytree.tree_leaves(expected)):
        return
    got = rg.invert(program.updates, program.streams, policy=program.policy)
    assert_close(gradients(got, program.leaves), gradients(expected, program.leaves))
