"""Two modalities, three modalities, and discrete choices inside of them, each against a plain loop in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg

VIDEO, AUDIO, TEXT = 6, 4, 5
"""The widths of the modalities. Their lengths differ too."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def loss_of(*outputs: Tensor) -> Tensor:
    """Its gradient depends on the outputs, and no two elements have the same weight."""
    return sum(
        ((torch.linspace(0.5, 1.5, out.numel()).view_as(out) * out.sin()).sum() for out in outputs), torch.zeros(())
    )


class Attend(nn.Module):
    """Attention of `x` to `context`, or to itself; both may be masked."""

    def __init__(self, width: int, width_read: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        width_read = width if width_read is None else width_read
        self.norm, self.query = nn.LayerNorm(width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width_read, width), nn.Linear(width_read, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        normed = self.norm(x)
        read = normed if context is None else context
        scores = self.query(normed) @ self.key(read).transpose(1, 2)
        if context_mask is not None:
            scores = scores.masked_fill(~context_mask[:, None], float("-inf"))
        out = self.dropout(scores.softmax(-1)) @ self.value(read)
        return out if mask is None else out * mask[..., None]


class Unmasked(Attend):
    """It names neither mask, so it gets none."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, context)


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def block(kind: str, attend: type[Attend] = Attend, **options: Any) -> tuple[nn.Module, ...]:
    read = {"self": (VIDEO, AUDIO), "context": (TEXT, TEXT), "other": (AUDIO, VIDEO)}[kind]
    return (
        attend(VIDEO, read[0], **options),
        feed_forward(VIDEO),
        attend(AUDIO, read[1], **options),
        feed_forward(AUDIO),
    )


def plain(
    net: rg.DualModality,
    video: Tensor,
    audio: Tensor,
    *,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
    x_mask: Tensor | None = None,
    m_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same networks in a loop."""
    x1, x2, m1, m2 = video, video, audio, audio
    for kind, (f, g, j, k) in zip(net.kinds, net.blocks, strict=True):
        if kind == "other":
            x1 = x1 + f(x2, m2, mask=x_mask, context_mask=m_mask)
        elif kind == "context":
            x1 = x1 + f(x2, context=context, mask=x_mask, context_mask=context_mask)
        else:
            x1 = x1 + f(x2, mask=x_mask)
        x2 = x2 + g(x1)
        if kind == "other":
            m1 = m1 + j(m2, x2, mask=m_mask, context_mask=x_mask)
        elif kind == "context":
            m1 = m1 + j(m2, context=context, mask=m_mask, context_mask=context_mask)
        else:
            m1 = m1 + j(m2, mask=m_mask)
        m2 = m2 + k(m1)
    return (x1 + x2) / 2, (m1 + m2) / 2


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return tuple(torch.randn(2, n, w, requires_grad=True) for n, w in ((7, VIDEO), (9, AUDIO), (3, TEXT)))  # type: ignore


def masks() -> dict[str, Tensor]:
    """All but the last one or two of each."""
    lengths = {"x_mask": 7, "m_mask": 9, "context_mask": 3}
    left = torch.tensor([[1], [2]])
    return {name: torch.arange(length).expand(2, -1) < length - left for name, length in lengths.items()}


def train(
    forward: Callable[..., Iterable[Tensor]], module: nn.Module, tensors: Iterable[Tensor], *args: Any, **kwargs: Any
) -> list[Any]:
    """Outputs and gradients, always from the same seed."""
    torch.manual_seed(2)
    outputs = tuple(forward(*args, **kwargs))
    wanted = [*tensors, *module.parameters()]
    found = torch.autograd.grad(loss_of(*outputs), wanted, allow_unused=True)
    return [[out.detach() for out in outputs], found]


KINDS = ("self", "context", "other", "other", "context")


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(anchor_every=3), rg.Keep()], ids=repr)
def test_all_kinds(policy: rg.Policy, masked: bool, training: bool) -> None:
    net = rg.DualModality([block(kind, dropout=0.3) for kind in KINDS], KINDS, policy=policy).train(training)
    video, audio, text = inputs()
    given: dict[str, Any] = {"context": text} | (masks() if masked else {})
    found = train(net, net, (video, audio, text), video, audio, **given)
    assert_same(
        found, train(lambda *args, **kw: plain(net, *args, **kw), net, (video, audio, text), video, audio, **given)
    )
    assert found[0][0].shape == video.shape
    assert found[0][1].shape == audio.shape


@pytest.mark.parametrize("kind", ["self", "context", "other"])
def test_each_kind(kind: str) -> None:
    net = rg.DualModality([block(kind), block(kind)], [kind, kind])  # type: ignore[list-item]
    video, audio, text = inputs()
    given = {"context": text} if kind == "context" else {}
    given |= {name: mask for name, mask in masks().items() if name != "context_mask" or kind == "context"}
    expected = train(lambda *args, **kw: plain(net, *args, **kw), net, (video, audio, text), video, audio, **given)
    assert_same(train(net, net, (video, audio, text), video, audio, **given), expected)


def test_masks_make_a_difference() -> None:
    """So that the tests above could fail."""
    net = rg.DualModality([block(kind) for kind in KINDS], KINDS)
    video, audio, text = inputs()
    whole = net(video, audio, context=text)
    for name, mask in masks().items():
        masked = net(video, audio, context=text, **{name: mask})
        assert not torch.allclose(masked[0], whole[0]), name
        assert not torch.allclose(masked[1], whole[1]), name


def test_networks_get_what_they_name() -> None:
    net = rg.DualModality([block("context", Unmasked), block("self")], ["context", "self"])
    video, audio, text = inputs()
    x1 = video + net.blocks[0][0](video, text)  # type: ignore[index]
    x2 = video + net.blocks[0][1](x1)  # type: ignore[index]
    mask = masks()["x_mask"]
    x1 = x1 + net.blocks[1][0](x2, mask=mask)  # type: ignore[index]
    x2 = x2 + net.blocks[1][1](x1)  # type: ignore[index]
    assert_same(net(video, audio, context=text, x_mask=mask)[0], (x1 + x2) / 2)


class OfOther(nn.Module):
    """Reads the mean of the other modality, whatever its dtype."""

    def __init__(self, width: int, width_read: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mine, self.other = nn.Linear(width, width, dtype=dtype), nn.Linear(width_read, width, dtype=dtype)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.mine(x) + self.other(other.mean(1, keepdim=True).to(x.dtype)))


def test_modalities_of_different_dtypes() -> None:
    """Video in float64, audio in float32: each keeps its own, and the gradients cross."""

    def blocks() -> Iterator[tuple[nn.Module, ...]]:
        for _ in range(3):
            yield (
                OfOther(VIDEO, AUDIO, torch.float64),
                nn.Sequential(nn.Linear(VIDEO, VIDEO), nn.Tanh()),
                OfOther(AUDIO, VIDEO, torch.float32),
                nn.Sequential(nn.Linear(AUDIO, AUDIO, dtype=torch.float32), nn.Tanh()),
            )

    net = rg.DualModality(blocks(), ["other"] * 3)
    video, audio = torch.randn(2, 7, VIDEO, requires_grad=True), torch.randn(2, 9, AUDIO, dtype=torch.float32)
    audio.requires_grad_()
    found = {}
    for name, run in (("ours", net), ("plain", None)):
        x1, x2, m1, m2 = video, video, audio, audio
        if run is None:
            for f, g, j, k in net.blocks:  # type: ignore[misc]
                x1 = x1 + f(x2, m2)
                x2 = x2 + g(x1)
                m1 = m1 + j(m2, x2)
                m2 = m2 + k(m1)
            out = (x1 + x2) / 2, (m1 + m2) / 2
        else:
            out = run(video, audio)
        assert [o.dtype for o in out] == [torch.float64, torch.float32]
        loss = loss_of(out[0], out[1].double())
        found[name] = torch.autograd.grad(loss, [video, audio, *net.parameters()])
    torch.testing.assert_close(found["ours"], found["plain"], rtol=1e-4, atol=1e-5)


def test_input_that_needs_no_grad() -> None:
    net = rg.DualModality([block(kind) for kind in KINDS], KINDS)
    video, audio, text = (x.detach() for x in inputs())
    loss_of(*net(video, audio, context=text)).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_one_modality_in_the_loss() -> None:
    net = rg.DualModality([block(kind) for kind in KINDS], KINDS)
    video, audio, text = inputs()
    found = train(lambda: net(video, audio, context=text)[:1], net, (video, audio, text))
    assert_same(found, train(lambda: plain(net, video, audio, context=text)[:1], net, (video, audio, text)))


def test_inverse() -> None:
    net = rg.DualModality([block(kind) for kind in KINDS], KINDS)
    video, audio, text = inputs()
    given = {"context": text} | masks()
    start = {"x1": video, "x2": video.cos(), "m1": audio, "m2": audio.cos()}
    assert_same(net.invert(net.run(start, **given), **given), start)
    with pytest.raises(ValueError, match=r"use run\(\) and invert\(\)"):
        net.inverse((video, audio))


class TestRefused:
    def test_number_of_kinds(self) -> None:
        with pytest.raises(ValueError, match="1 kinds for 2 blocks"):
            rg.DualModality([block("self"), block("self")], ["self"])

    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="'self', 'context' or 'other', not 'cross'"):
            rg.DualModality([block("self")], ["cross"])  # type: ignore[list-item]

    def test_number_of_networks(self) -> None:
        with pytest.raises(ValueError, match=r"block 1 must be four networks \(f, g, j, k\)"):
            rg.DualModality([block("self"), block("self")[:3]], ["self", "self"])

    def test_networks_that_are_not_modules(self) -> None:
        with pytest.raises(ValueError, match=r"block 0 must be four networks .* of modules"):
            rg.DualModality([(torch.sin, torch.sin, torch.sin, torch.sin)], ["self"])  # type: ignore[list-item]

    def test_a_join_that_is_none(self) -> None:
        with pytest.raises(TypeError, match="join must be a Join"):
            rg.DualModality([block("self")], ["self"], join="add")  # type: ignore[arg-type]

    def test_missing_context(self) -> None:
        net = rg.DualModality([block("context")], ["context"])
        with pytest.raises(ValueError, match="context must be given"):
            net(*inputs()[:2])

    @pytest.mark.parametrize("name", ["context", "context_mask"])
    def test_context_that_no_block_reads(self, name: str) -> None:
        net = rg.DualModality([block("self")], ["self"])
        given = {"context": inputs()[2], "context_mask": masks()["context_mask"]}
        with pytest.raises(TypeError, match=f"no network takes the keyword '{name}'"):
            net(*inputs()[:2], **{name: given[name]})

    @pytest.mark.parametrize("name", ["x_mask", "m_mask"])
    def test_mask_that_no_network_names(self, name: str) -> None:
        net = rg.DualModality([block("self", Unmasked)], ["self"])
        with pytest.raises(TypeError, match=f"no network takes the keyword '{name}'"):
            net(*inputs()[:2], **{name: masks()[name]})

    def test_unknown_keyword(self) -> None:
        net = rg.DualModality([block("self")], ["self"])
        with pytest.raises(TypeError, match="video_mask"):
            net(*inputs()[:2], video_mask=masks()["x_mask"])

    def test_one_modality_alone(self) -> None:
        net = rg.DualModality([block("self")], ["self"])
        with pytest.raises(TypeError, match="'m'"):
            net(inputs()[0])

    def test_output_of_another_shape(self) -> None:
        f, g, j, _ = block("self")
        net = rg.DualModality([(f, g, j, nn.Linear(AUDIO, VIDEO))], ["self"])
        with pytest.raises(ValueError, match=r"update 3 \(target 'm2', fn Linear\)"):
            net(*inputs()[:2])


# Three modalities: the updates, written out


class ThreeModalities(rg.Reversible):
    """Audio, video and text, each of two streams. Each reads itself and the newest state of the other two."""

    widths = {"audio": AUDIO, "video": VIDEO, "text": TEXT}  # noqa: RUF012

    def __init__(self, depth: int, policy: rg.Policy = rg.Reverse()) -> None:
        super().__init__(policy=policy)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    f"{name} {role}": Gather([width, *others]) if role == "reads" else feed_forward(width)
                    for name, width in self.widths.items()
                    for others in [[w for other, w in self.widths.items() if other != name]]
                    for role in ("reads", "feeds")
                }
            )
            for _ in range(depth)
        )

    def updates(self, scale: Tensor) -> Iterator[rg.Update]:
        for block in self.blocks:
            for name in self.widths:
                others = [f"{other}2" for other in self.widths if other != name]
                reads, feeds = block[f"{name} reads"], block[f"{name} feeds"]  # type: ignore[index]
                yield rg.Update(f"{name}1", reads, (f"{name}2", *others), kwargs={"scale": scale})
                yield rg.Update(f"{name}2", feeds, f"{name}1")

    def split(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}{i}": x[name] for name in self.widths for i in (1, 2)}

    def merge(self, streams: Any) -> dict[str, Tensor]:
        return {name: (streams[f"{name}1"] + streams[f"{name}2"]) / 2 for name in self.widths}


class Gather(nn.Module):
    """The first input, plus the means of the others."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, widths[0]) for width in widths)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *others: Tensor, scale: Tensor) -> Tensor:
        first, *rest = self.linears
        read = sum(linear(other).mean(1, keepdim=True) for linear, other in zip(rest, others, strict=True))
        return self.dropout(torch.tanh(first(x) + read * scale))


@pytest.mark.parametrize("policy", [rg.Reverse(), rg.Reverse(anchor_every=5), rg.Keep()], ids=repr)
def test_three_modalities(policy: rg.Policy) -> None:
    net = ThreeModalities(3, policy)
    video, audio, text = inputs()
    start, scale = {"audio": audio, "video": video, "text": text}, torch.tensor(0.7, requires_grad=True)

    def loop() -> list[Tensor]:
        a1, v1, t1 = a2, v2, t2 = audio, video, text
        for block in net.blocks:
            a1 = a1 + block["audio reads"](a2, v2, t2, scale=scale)  # type: ignore[index]
            a2 = a2 + block["audio feeds"](a1)  # type: ignore[index]
            v1 = v1 + block["video reads"](v2, a2, t2, scale=scale)  # type: ignore[index]
            v2 = v2 + block["video feeds"](v1)  # type: ignore[index]
            t1 = t1 + block["text reads"](t2, a2, v2, scale=scale)  # type: ignore[index]
            t2 = t2 + block["text feeds"](t1)  # type: ignore[index]
        return [(a1 + a2) / 2, (v1 + v2) / 2, (t1 + t2) / 2]

    tensors = (*start.values(), scale)
    assert_same(train(lambda: net(start, scale=scale).values(), net, tensors), train(loop, net, tensors))

    net.eval()
    streams = {name: value.sin() for name, value in net.split(start).items()}
    assert_same(net.invert(net.run(streams, scale=scale), scale=scale), streams)


# Discrete choices: attention within hash buckets


class HashedAttention(nn.Module):
    """Tokens are sorted by the bucket of their hash, and each attends to its chunk of the sorted sequence.

    `choose` decides how buckets are taken: `hash` at each call, or through something that keeps them for the replay.
    """

    CHUNK = 4

    def __init__(self, width: int, buckets: int, planted: bool, choose: Callable[..., Tensor]) -> None:
        super().__init__()
        self.shared, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.buckets, self.choose = buckets, choose
        self.seen: list[Tensor] = []
        if planted:  # hashes are the first components themselves, so equal components are a tie
            nn.init.eye_(self.shared.weight)
            self.register_buffer("fixed", torch.eye(width, buckets // 2))
        else:
            self.fixed = None

    def hash(self, x: Tensor) -> Tensor:
        rotations = torch.randn(x.shape[-1], self.buckets // 2) if self.fixed is None else self.fixed
        rotated = x @ rotations
        return torch.cat((rotated, -rotated), dim=-1).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        buckets = self.choose(self, lambda: self.hash(shared.detach()))
        self.seen.append(buckets)
        order = (buckets * x.shape[1] + torch.arange(x.shape[1])).argsort(-1)
        back = order.argsort(-1)
        chunked = [
            t.take_along_dim(order[..., None], 1).unflatten(1, (-1, self.CHUNK)) for t in (shared, self.value(x))
        ]
        scores = chunked[0] @ chunked[0].transpose(-1, -2)
        return (scores.softmax(-1) @ chunked[1]).flatten(1, 2).take_along_dim(back[..., None], 1)


def hash_again(module: HashedAttention, compute: Callable[[], Tensor]) -> Tensor:
    return compute()


def remembered(module: HashedAttention, compute: Callable[[], Tensor]) -> Tensor:
    return rg.remember(compute)


class ByPhase:
    """What reformer's attention does with `_reverse` and `_depth`: a cache of its own, read in the replay."""

    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}
        self.phases: list[tuple[int, str, bool]] = []

    def __call__(self, module: HashedAttention, compute: Callable[[], Tensor]) -> Tensor:
        phase = rg.phase()
        if phase is None:
            return compute()
        self.phases.append((phase.update, phase.target, phase.replaying))
        if not phase.replaying:
            self.cache[phase.update] = compute()
        return self.cache[phase.update]


def hashed(choose: Callable[..., Tensor], planted: bool = False, depth: int = 2) -> list[tuple[nn.Module, nn.Module]]:
    torch.manual_seed(0)
    return [(HashedAttention(VIDEO, 4, planted, choose), feed_forward(VIDEO)) for _ in range(depth)]


def loop_over(blocks: Iterable[Iterable[nn.Module]], x: Tensor) -> tuple[Tensor]:
    a = b = x
    for f, g in blocks:
        a = a + f(b)
        b = b + g(a)
    return ((a + b) / 2,)


def tokens(planted: bool = False) -> Tensor:
    """Two sequences of 64. Planted: the two largest components of each token are equal, so its bucket is a tie."""
    torch.manual_seed(3)
    x = torch.randn(2, 64, VIDEO)
    if planted:
        x[..., 0] = x[..., 1] = x.abs().amax(-1) + 0.1
    return x.requires_grad_()


def buckets_in_both_passes(net: rg.ReversibleSequence) -> list[tuple[Tensor, Tensor]]:
    networks = [module for module in net.modules() if isinstance(module, HashedAttention)]
    assert all(len(module.seen) == 2 for module in networks)
    return [(module.seen[0], module.seen[1]) for module in networks]


@pytest.mark.parametrize("choose", [hash_again, remembered, ByPhase()], ids=["again", "remember", "phase"])
def test_hash_rotations_are_drawn_again_as_before(choose: Any) -> None:
    """Without a tie, the random numbers of the replay are enough."""
    blocks, x = hashed(choose), tokens()
    net = rg.ReversibleSequence(blocks)
    found = train(lambda: (net(x),), net, (x,))
    assert_same([a for a, _ in buckets_in_both_passes(net)], [b for _, b in buckets_in_both_passes(net)])
    assert_same(found, train(lambda: loop_over(blocks, x), net, (x,)))


def test_buckets_flip_without_remember() -> None:
    """A reconstructed input differs in its last bits, and a tie falls the other way."""
    blocks, x = hashed(hash_again, planted=True), tokens(planted=True)
    net = rg.ReversibleSequence(blocks)
    found = train(lambda: (net(x),), net, (x,))
    flips = [int((a != b).sum()) for a, b in buckets_in_both_passes(net)]
    assert flips[0] > 0
    _, expected = train(lambda: loop_over(blocks, x), net, (x,))
    assert max((a - b).norm() / b.norm() for a, b in zip(found[1], expected, strict=True)) > 1e-3


@pytest.mark.parametrize("choose", [remembered, ByPhase()], ids=["remember", "phase"])
def test_buckets_are_kept(choose: Any) -> None:
    blocks, x = hashed(choose, planted=True), tokens(planted=True)
    net = rg.ReversibleSequence(blocks)
    found = train(lambda: (net(x),), net, (x,))
    for forward, replay in buckets_in_both_passes(net):
        assert torch.equal(forward, replay)
    assert_same(found, train(lambda: loop_over(blocks, x), net, (x,)))


def test_phase_says_what_reverse_and_depth_said() -> None:
    choose = ByPhase()
    net, x = rg.ReversibleSequence(hashed(choose, depth=3)), tokens()
    net(x).sum().backward()
    assert choose.phases == [(2 * depth, "a", False) for depth in range(3)] + [
        (2 * depth, "a", True) for depth in reversed(range(3))
    ]
    with torch.no_grad():
        net(x)
    assert choose.phases[6:] == [(2 * depth, "a", False) for depth in range(3)]


def test_two_forwards_before_a_backward() -> None:
    """What is remembered belongs to the call, so a second forward leaves it alone; a module's cache it overwrites."""
    x, y = tokens(planted=True), tokens(planted=True).detach().flip(1).requires_grad_()
    errors = {}
    for name, choose in (("remember", remembered), ("cache", ByPhase())):
        blocks = hashed(choose, planted=True)
        net = rg.ReversibleSequence(blocks)
        _, found = train(lambda net=net: (net(x), net(y)), net, (x, y))
        _, expected = train(lambda blocks=blocks: loop_over(blocks, x) + loop_over(blocks, y), net, (x, y))
        errors[name] = max((a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True))
    assert errors["remember"] < 1e-10
    assert errors["cache"] > 1e-3


def test_a_mask_that_nobody_takes_is_refused_even_if_it_is_that_of_the_other_modality() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    networks = (Masked(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net, x, mask = rg.DualModality([networks], ["self"]), torch.randn(2, 4), torch.ones(2)
    with pytest.raises(TypeError, match="no network takes the keyword 'm_mask'"):
        net(x, x, x_mask=mask, m_mask=mask)
    other = rg.DualModality([networks], ["other"])  # f asks for its own mask only
    with pytest.raises(TypeError, match="no network takes the keyword 'm_mask'"):
        other.updates(x_mask=mask, m_mask=mask)
