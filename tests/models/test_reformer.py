"""The Reformer: gradients against a plain loop, hashing against exact attention, and what a step holds and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.models.reformer import FeedForward, LSHAttention, Reformer

VOCABULARY = 20


def model(depth: int = 3, **options: Any) -> Reformer:
    torch.manual_seed(0)
    options = {"heads": 2, "length": 64, "bucket_size": 8, "rounds": 2} | options
    return Reformer(depth, 16, vocabulary=VOCABULARY, **options)


def tokens(length: int = 50, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def plain_blocks(net: Reformer) -> Callable[[Tensor], Tensor]:
    """The blocks in a loop that keeps its activations."""

    def run(x: Tensor) -> Tensor:
        a = b = x
        for f, g in net.blocks.pairs():
            a = a + f(b)
            b = b + g(a)
        return (a + b) / 2

    return run


def gradients(net: Reformer, *args: Tensor) -> list[Tensor]:
    torch.manual_seed(2)
    loss = net.loss(*args)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("attention", ["lsh", "exact"])
def test_gradients_are_those_of_a_plain_loop(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(attention=attention, feed_forward_chunks=3).double()
    found = gradients(net, tokens())
    monkeypatch.setattr(net.blocks, "forward", plain_blocks(net))
    torch.testing.assert_close(found, gradients(net, tokens()), rtol=1e-9, atol=1e-11)


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(feed_forward_chunks=2)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(net, tokens())
        monkeypatch.setattr(net.blocks, "forward", plain_blocks(net))
        expected = gradients(net, tokens())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("length", [1, 7, 40])
def test_one_bucket_is_exact(length: int) -> None:
    exact, hashed = model(attention="exact").double(), model(bucket_size=40).double()
    hashed.load_state_dict(exact.state_dict())
    torch.testing.assert_close(hashed(tokens(length)), exact(tokens(length)), rtol=1e-6, atol=1e-10)


def test_rounds_are_one_softmax_over_what_they_found() -> None:
    """Against a plain computation: each pair of tokens counts in as many rounds as put it into one reach."""
    torch.manual_seed(0)
    attention = LSHAttention(8, heads=1, bucket_size=4, rounds=3).double()
    query, value = torch.randn(2, 1, 1, 16, 8, dtype=torch.double)
    torch.manual_seed(3)
    found = attention.mix(query, value)[0, 0]
    torch.manual_seed(3)
    counts = torch.zeros(16, 16)
    for buckets in attention.buckets(query, 4)[:, 0, 0].tolist():
        order = sorted(range(16), key=lambda place: (buckets[place], place))
        chunk = {place: index // 4 for index, place in enumerate(order)}
        for i in range(16):
            for j in range(i):
                counts[i, j] += chunk[i] - chunk[j] in (0, 1)
    alone = counts.sum(1) == 0
    counts[alone] += torch.eye(16)[alone]  # itself, where nothing else is found
    query, value = query[0, 0], value[0, 0]
    weights = counts * (query @ functional.normalize(query, dim=-1).T).exp()
    torch.testing.assert_close(found, weights / weights.sum(1, keepdim=True) @ value)
    assert alone.sum() < 8
    assert (counts == 0).tril(-1).any()


@pytest.mark.parametrize("attention", ["lsh", "exact"])
def test_nothing_comes_from_later_tokens(attention: str) -> None:
    net = model(attention=attention).double()
    given: list[Tensor] = []
    net.embed.register_forward_hook(lambda *args: given.append(args[-1]))
    (grad,) = torch.autograd.grad(net(tokens())[:, 30].square().sum(), given)
    assert not grad[:, 31:].any()
    assert grad[:, 30].any()
    assert grad[:, :30].any()


def test_finds_planted_neighbours() -> None:
    """Each of the last 256 vectors resembles one of the first 256: they share a bucket, and it gets the attention."""
    torch.manual_seed(0)
    attention = LSHAttention(32, heads=1, bucket_size=16, rounds=4)
    vectors = torch.randn(512, 32)
    twin = torch.randperm(256)
    vectors[256:] = vectors[twin] + 0.05 * torch.randn(256, 32)
    buckets = attention.buckets(vectors[None, None], 512 // 16)[:, 0, 0]  # (rounds, 512)
    together = (buckets[:, 256:] == buckets[:, twin]).any(0).float().mean()
    strangers = (buckets[:, 256:] == buckets[:, twin.roll(1)]).any(0).float().mean()
    assert together > 0.97
    assert strangers < 0.3
    value = torch.randn(512, 32)
    out = attention.mix(10 * vectors[None, None], value[None, None])[0, 0, 256:]
    found = (out - value[twin]).norm(dim=-1) < 0.1 * value[twin].norm(dim=-1)
    assert found.float().mean() > 0.97


def test_buckets_are_taken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    buckets = LSHAttention.buckets

    def counted(self: LSHAttention, *args: Any) -> Tensor:
        phase = rg.phase()
        calls.append(phase is not None and phase.replaying)
        return buckets(self, *args)

    monkeypatch.setattr(LSHAttention, "buckets", counted)
    model(depth=3).loss(tokens()).backward()
    assert calls == [False] * 3


def test_memory_grows_by_the_buckets_alone() -> None:
    def peak(depth: int) -> int:
        net = model(depth, length=512)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as memory:
            net.loss(tokens(513)).backward()
        return memory.peak

    stream, buckets = 2 * 512 * 16 * 4, 2 * 2 * 2 * 512 * 4  # (B, T, C) of float32, (R, B, H, T) of int32
    random = 3 * torch.get_rng_state().numel()  # before the buckets, and after them for what is drawn next
    growth = (peak(10) - peak(2)) / 8
    assert buckets <= growth <= buckets + random
    assert growth < stream


def test_one_round_at_a_time() -> None:
    """Of further rounds only the outputs are held, never the scores."""
    x, bucket_size = torch.randn(1, 512, 8), 32

    def peak(rounds: int) -> int:
        torch.manual_seed(0)
        attention = LSHAttention(8, heads=2, bucket_size=bucket_size, rounds=rounds)
        with LiveBytes() as memory:
            attention(x).sum().backward()
        return memory.peak

    scores = 2 * 512 * 2 * bucket_size * 4  # (B, H, N, S, 2S) of float32
    assert peak(6) - peak(2) < scores


def test_feed_forward_in_chunks() -> None:
    torch.manual_seed(0)
    whole, chunked = FeedForward(16, 1), FeedForward(16, 8)
    chunked.load_state_dict(whole.state_dict())
    x = torch.randn(1, 512, 16)
    torch.testing.assert_close(chunked(x), whole(x))

    def peak(network: nn.Module) -> int:
        given = x.clone().requires_grad_()
        with LiveBytes() as memory:
            network(given).sum().backward()
        return memory.peak

    assert peak(chunked) < peak(whole) / 2


def test_loss_in_chunks() -> None:
    net, given = model(attention="exact").double(), tokens(33)
    logits = net(given[:, :-1])
    expected = functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())
    torch.testing.assert_close(net.loss(given, chunk=10), expected)
    targets = given[:, 1:].where(torch.arange(32) % 3 == 0, -100)
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(net.loss(given[:, :-1], targets, chunk=10), expected)


def test_logits_are_never_all_there() -> None:
    torch.manual_seed(0)
    net = Reformer(1, 16, vocabulary=5000, heads=2, length=64, bucket_size=8)
    with LiveBytes() as memory:
        net.loss(tokens(65, batch=8), chunk=16).backward()
    assert memory.peak < 8 * 64 * 5000 * 4  # one tensor of all logits


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(2, 65).long(), ValueError, "65 tokens; the model is for at most 64"),
        (torch.zeros(2, 5), TypeError, "int64 or int32, not torch.float32"),
        (torch.zeros(5).long(), ValueError, r"\(batch, 1 or more tokens\), not \(5,\)"),
        (torch.zeros(2, 0).long(), ValueError, r"\(batch, 1 or more tokens\), not \(2, 0\)"),
    ],
)
def test_wrong_tokens(given: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model()(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width 16 must be a multiple of the number of heads, 3"),
        ({"rounds": 0}, "rounds must be a positive whole number, not 0"),
        ({"bucket_size": 2.5}, "bucket_size must be a positive whole number, not 2.5"),
        ({"attention": "full"}, "must be 'lsh' or 'exact', not 'full'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_wrong_targets() -> None:
    with pytest.raises(ValueError, match=r"shape of tokens, \(2, 50\), not \(2, 49\)"):
        model().loss(tokens(), tokens(49))
    with pytest.raises(ValueError, match=r"a token and its next, not \(2, 1\)"):
        model().loss(tokens(1))
    with pytest.raises(TypeError, match=r"targets are ids in int64 or int32, not torch.float32"):
        model().loss(tokens(), tokens().float())
    with pytest.raises(ValueError, match=r"token ids must lie between 0 and .* not between 999 and 999"):
        model().loss(tokens(), torch.full_like(tokens(), 999))
    with pytest.raises(ValueError, match=r"token ids must lie between 0 and .* not between 999 and 999"):
        model()(torch.full_like(tokens(), 999))
