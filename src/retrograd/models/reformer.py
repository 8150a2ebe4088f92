"""A Reformer (Kitaev et al., 2020): a causal language model for long sequences.

Queries and keys are one projection, so a token looks for tokens like itself, and those are found by hashing: random
rotations put similar vectors into one bucket, tokens are sorted by bucket, and each chunk of the sorted sequence
attends to itself and to the chunk before. Several rounds of hashing make a miss unlikely. Time and memory grow with the
length, not with its square; reversible blocks make memory independent of the depth; feed-forward and loss run in
chunks. Buckets are a discrete choice, which a replay must not take again: `rg.remember`.

Beyond the paper, a query-key is mixed with that of the token before it, so that a token is found by what precedes it.

Shapes: B batch, T tokens, C width, H heads, D = C / H, S bucket size, N = T / S chunks, R rounds.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import retrograd as rg

LAST_RESORT = -1e5  # the score of a token with itself: it counts only where nothing else can be seen


class Reformer(nn.Module):
    """Predicts the next token. `depth` blocks of `width` channels, for at most `length` tokens of a `vocabulary`.

    Attention takes `rounds` of hashing into buckets of `bucket_size` tokens on average; `attention="exact"` has the
    same weights and looks at everything: a check at small sizes. The feed-forward runs on `feed_forward_chunks` pieces
    of the sequence, one after the other. `policy` and `join` are those of the blocks.

    No token attends to a later one. But later ones fill buckets too, and so have a say in which earlier ones it sees.

    >>> model = Reformer(2, 32, vocabulary=100, heads=2, length=1024, bucket_size=16)
    >>> tokens = torch.randint(100, (1, 200))
    >>> model(tokens).shape
    torch.Size([1, 200, 100])
    >>> model.loss(tokens).backward()
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        vocabulary: int,
        heads: int,
        length: int,
        bucket_size: int = 64,
        rounds: int = 4,
        feed_forward_chunks: int = 1,
        attention: Literal["lsh", "exact"] = "lsh",
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        sizes = {"depth": depth, "width": width, "vocabulary": vocabulary, "heads": heads, "length": length}
        sizes |= {"bucket_size": bucket_size, "rounds": rounds, "feed_forward_chunks": feed_forward_chunks}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"Reformer: {name} must be a positive whole number, not {size!r}")
        if width % heads:
            raise ValueError(f"Reformer: width {width} must be a multiple of the number of heads, {heads}")
        if attention not in ("lsh", "exact"):
            raise ValueError(f"Reformer: attention must be 'lsh' or 'exact', not {attention!r}")
        self.vocabulary, self.length = vocabulary, length
        self.embed = nn.Embedding(vocabulary, width)
        columns = math.ceil(math.sqrt(length))  # a position is a row and a column: 2√length vectors, not length
        self.rows = nn.Parameter(0.02 * torch.randn(math.ceil(length / columns), 1, width))
        self.columns = nn.Parameter(0.02 * torch.randn(1, columns, width))

        def attend() -> nn.Module:
            exact = attention == "exact"
            return ExactAttention(width, heads) if exact else LSHAttention(width, heads, bucket_size, rounds)

        self.blocks = rg.ReversibleSequence(
            [(attend(), FeedForward(width, feed_forward_chunks)) for _ in range(depth)], policy=policy, join=join
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position: (B, T) -> (B, T, vocabulary)."""
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads: (B, T) -> (B, T, C)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Reformer: tokens are ids in int64 or int32, not {tokens.dtype}; use tokens.long()")
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"Reformer: tokens must be (batch, 1 or more tokens), not {tuple(tokens.shape)}")
        length, columns = tokens.shape[1], self.columns.shape[1]
        if length > self.length:
            raise ValueError(
                f"Reformer: {length} tokens; the model is for at most {self.length}: cut them, or build the model with "
                "a larger length"
            )
        positions = (self.rows[: math.ceil(length / columns)] + self.columns).flatten(0, 1)[:length]  # (T, C)
        try:
            embedded = self.embed(tokens)
        except IndexError:
            raise self.not_in_vocabulary(tokens) from None
        return self.norm(self.blocks(embedded + positions))

    def loss(self, tokens: Tensor, targets: Tensor | None = None, *, chunk: int = 4096) -> Tensor:
        """The mean cross entropy, in nats: of each next token in tokens (B, T + 1), or of targets (B, T) that say what
        follows each of the tokens (B, T), where -100 means no matter what.

        Logits are computed for `chunk` positions at a time, and again in the backward: they are never all there.
        """
        if chunk < 1:
            raise ValueError(f"loss: chunk must be a positive number of positions, not {chunk!r}")
        if targets is None:
            if tokens.dim() != 2 or tokens.shape[1] < 2:
                raise ValueError(
                    f"Reformer: loss needs tokens (batch, 2 or more): a token and its next, not {tuple(tokens.shape)}"
                )
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
        elif targets.shape != tokens.shape:
            raise ValueError(
                f"Reformer: targets must have the shape of tokens, {tuple(tokens.shape)}, not {tuple(targets.shape)}"
            )
        elif targets.is_floating_point():
            raise TypeError(f"Reformer: targets are ids in int64 or int32, not {targets.dtype}; use targets.long()")
        targets = targets.flatten().long()
        pieces = zip(self.hidden(tokens).flatten(0, 1).split(chunk), targets.split(chunk), strict=True)
        sums = [recomputed(self.summed_loss, *piece) for piece in pieces]
        return torch.stack(sums).sum() / (targets != -100).sum()

    def summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        try:
            return functional.cross_entropy(self.head(hidden), targets, reduction="sum")
        except IndexError:
            raise self.not_in_vocabulary(targets) from None

    def not_in_vocabulary(self, tokens: Tensor) -> ValueError:
        """Raised where an operator has found it; on CUDA the operator itself asserts."""
        return ValueError(
            f"Reformer: token ids must lie between 0 and {self.vocabulary - 1}, the vocabulary, not between "
            f"{tokens.min()} and {tokens.max()}"
        )


class ExactAttention(nn.Module):
    """Causal attention whose queries are its keys, in T² time and memory: what `LSHAttention` approximates.

    >>> ExactAttention(16, heads=2)(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.shift = nn.Parameter(torch.full((width,), 0.5))  # how much of the token before, for each channel

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        query, value = self.project(self.norm(x)).chunk(2, dim=-1)  # (B, T, C) each
        before = functional.pad(query, (0, 0, 1, 0))[:, :-1]
        query = query + self.shift.to(query.dtype) * (before - query)
        query, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, value))  # (B, H, T, D)
        return self.out(self.mix(query, value).transpose(1, 2).flatten(2))

    def mix(self, query: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(query.shape[2], device=query.device)
        return attend(query, unit(query), value, place, place)[0]


class LSHAttention(ExactAttention):
    """The same attention, but only to tokens whose query-key hashes alike. With `bucket_size >= T` it is exact.

    >>> LSHAttention(16, heads=2, bucket_size=8, rounds=2)(torch.randn(1, 100, 16)).shape
    torch.Size([1, 100, 16])
    """

    def __init__(self, width: int, heads: int, bucket_size: int, rounds: int) -> None:
        super().__init__(width, heads)
        self.bucket_size, self.rounds = bucket_size, rounds

    def mix(self, query: Tensor, value: Tensor) -> Tensor:  # (B, H, T, D)
        length = query.shape[2]
        size = min(self.bucket_size, length)
        fill = -length % size  # to whole chunks, at the end, where causal attention does not look
        query, value = (functional.pad(x, (0, 0, 0, fill)) for x in (query, value))
        buckets = rg.remember(lambda: self.buckets(query, length // size))  # (R, B, H, T)
        rounds = [recomputed(self.one_round, query, value, each, size) for each in buckets]
        outs, totals = zip(*rounds, strict=True)  # R times (B, H, T, D), and (B, H, T)
        # One softmax over all rounds; a token that several of them found counts several times.
        shares = torch.stack(totals).softmax(0).to(value.dtype).unsqueeze(-1)  # (R, B, H, T, 1)
        mixed = sum(out * share for out, share in zip(outs, shares, strict=True))
        return cast(Tensor, mixed)[:, :, :length]

    def buckets(self, vectors: Tensor, number: int) -> Tensor:
        """The bucket of each vector in each round, one of `number` or a few more: (B, H, T, D) -> (R, B, H, T).

        Which of 2n half-axes is nearest after a random rotation is a hash of 2n values. Two make (2n)² buckets, so that
        n is only about half the square root of their number.
        """
        axes = math.ceil(math.sqrt(number) / 2)
        rotations = torch.randn(self.rounds, 2, 1, 1, vectors.shape[-1], axes, device=vectors.device)
        found = []
        for pair in rotations.to(vectors.dtype):
            rotated = [vectors @ rotation for rotation in pair]  # (B, H, T, axes) each
            first, second = (torch.cat([each, -each], -1).argmax(-1) for each in rotated)
            found.append((first * 2 * axes + second).int())
        return torch.stack(found)

    def one_round(self, query: Tensor, value: Tensor, buckets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Sort by bucket, and in a bucket by position; attend within each chunk and to the one before; sort back."""
        order = buckets.argsort(dim=-1, stable=True)  # (B, H, T)
        index = order.unsqueeze(-1).expand_as(query)
        query, value = (x.gather(2, index).unflatten(2, (-1, size)) for x in (query, value))  # (B, H, N, S, D)
        place = order.unflatten(2, (-1, size)).unsqueeze(-1)  # (B, H, N, S, 1)
        key, value = with_previous(unit(query)), with_previous(value)  # (B, H, N, 2S, D)
        key_place = with_previous(place, nothing=order.shape[-1])  # nothing is later than all, so it is never seen
        out, total = attend(query, key, value, place.squeeze(-1), key_place.squeeze(-1))
        out, total = out.flatten(2, 3), total.flatten(2)
        return torch.empty_like(out).scatter(2, index, out), torch.empty_like(total).scatter(2, order, total)


class FeedForward(nn.Module):
    """A feed-forward network on `chunks` pieces of the sequence, so that its wide layer is only there for one of them.

    >>> FeedForward(16, chunks=3)(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(self, width: int, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        if self.chunks == 1:
            return self.layers(x)
        return torch.cat([recomputed(self.layers, piece) for piece in x.chunk(self.chunks, dim=1)], dim=1)


def attend(query: Tensor, key: Tensor, value: Tensor, place: Tensor, key_place: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention among tokens at these places, (..., S, D), and the logarithms of its sums, (..., S)."""
    scores = query @ key.mT  # (..., S, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    place, key_place = place.unsqueeze(-1), key_place.unsqueeze(-2)
    scores = scores.masked_fill_(place == key_place, LAST_RESORT).masked_fill_(place < key_place, -math.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - highest).exp_()
    sums = weights.sum(-1, keepdim=True)
    out = weights.to(value.dtype) @ value / sums
    return out.to(value.dtype), (highest + sums.log()).squeeze(-1)


def unit(query: Tensor) -> Tensor:
    """The key that belongs to a query: of length 1, so that a token does not attend to the longest vector."""
    return functional.normalize(query, dim=-1).to(query.dtype)  # under autocast it would be float32


def with_previous(chunks: Tensor, nothing: int = 0) -> Tensor:
    """Each chunk behind the one before it: (B, H, N, S, D) -> (B, H, N, 2S, D)."""
    previous = functional.pad(chunks[:, :, :-1], (0, 0, 0, 0, 1, 0), value=nothing)
    return torch.cat([previous, chunks], dim=3)


def recomputed(function: Any, *args: Any) -> Any:
    """Call it now, and once more in its backward: of several such calls, only one at a time is held in memory."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
