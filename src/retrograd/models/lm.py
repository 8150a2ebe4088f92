"""A decoder-only language model of any depth, trained in the activation memory of one block.

The blocks are reversible pairs of causal attention and a gated feed-forward, as in Reformer (Kitaev et al., 2020), each
with a norm before it (RMSNorm: Zhang and Sennrich, 2019). Positions are rotations of queries and keys (Su et al.,
2021), the feed-forward is SwiGLU (Shazeer, 2020). Nothing but `ReversibleSequence` knows that the model is reversible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import retrograd as rg

NONE = torch.iinfo(torch.int64).min  # no token id is ignored, not even -100


class LanguageModel(nn.Module):
    """Predicts the next token. `depth` blocks of `width` channels, for at most `length` tokens of a `vocabulary`.

    `heads` is `width // 64` unless told. `dropout` is that of the embedding and of what each network adds to its
    stream. `policy` and `join` are those of the blocks: `model.blocks.policy` may be changed at any time.

    >>> model = LanguageModel(depth=2, width=32, length=16)
    >>> tokens = torch.randint(256, (4, 17))
    >>> model(tokens[:, :-1]).shape
    torch.Size([4, 16, 256])
    >>> model.loss(tokens).backward()  # in nats per token
    >>> model.generate(tokens[:, :3], new_tokens=5).shape
    torch.Size([4, 8])
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        vocabulary: int = 256,
        heads: int | None = None,
        length: int = 1024,
        dropout: float = 0.0,
        policy: rg.Policy = rg.Reverse(),
        join: rg.Join = rg.Add(),
    ) -> None:
        super().__init__()
        for name, value in (("depth", depth), ("width", width), ("vocabulary", vocabulary), ("length", length)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"LanguageModel: {name} must be a positive whole number, not {value!r}")
        heads = max(width // 64, 1) if heads is None else heads
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(f"LanguageModel: heads must be a positive whole number, not {heads!r}")
        if width % heads or (width // heads) % 2:
            raise ValueError(
                f"LanguageModel: width {width} must be an even number of channels for each of {heads} heads, since "
                f"positions rotate pairs of channels; a multiple of {2 * heads} fits"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"LanguageModel: dropout must be a probability below 1, not {dropout!r}")
        self.vocabulary, self.length, self.dropout, self.head_width = vocabulary, length, dropout, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = rg.ReversibleSequence(
            [(Attention(width, heads, dropout), FeedForward(width, dropout)) for _ in range(depth)],
            policy=policy,
            join=join,
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.initialise(depth)

    @torch.no_grad()
    def initialise(self, depth: int) -> None:
        """Unit variance after each matrix, except that what the blocks add sums up to about one at any depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for network in (network for pair in self.blocks.pairs() for network in pair):
            network.out.weight /= math.sqrt(2 * depth)  # type: ignore[union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position: (batch, length) -> (batch, length, vocabulary)."""
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head reads: (batch, length) -> (batch, length, width).

        A cache has seen the tokens before these: first it gets a prompt, then one token at a time.
        """
        before = 0 if cache is None else cache.filled
        self.refuse(tokens, before)
        if before and tokens.shape[1] > 1:
            raise ValueError(f"LanguageModel: after a prompt, a cache takes one token at a time, not {tokens.shape[1]}")
        try:
            x = self.embed(tokens)  # (B, T, C)
        except IndexError:
            raise self.not_in_vocabulary(tokens) from None
        x = functional.dropout(x, self.dropout, self.training)
        x = self.blocks(x, rotation=self.rotation(before, tokens.shape[1], x.device), cache=cache)
        if cache is not None:
            cache.filled += tokens.shape[1]
        return self.norm(x)

    def rotation(self, start: int, length: int, device: torch.device) -> Tensor:
        """The cosines and sines by which positions rotate pairs of channels: (2, length, head width / 2)."""
        pairs = torch.arange(self.head_width // 2, device=device, dtype=torch.float32)
        frequencies = 10000.0 ** (-2 * pairs / self.head_width)
        angles = torch.arange(start, start + length, device=device)[:, None] * frequencies
        return torch.stack((angles.cos(), angles.sin()))

    def loss(self, tokens: Tensor, *, chunk: int = 4096) -> Tensor:
        """The mean cross entropy, in nats, of each next token in tokens (batch, length + 1).

        Logits are computed for `chunk` positions at a time, and again in the backward: they are never all there.
        """
        if tokens.dim() != 2 or tokens.shape[1] < 2:
            raise ValueError(f"loss needs tokens (batch, 2 or more): a token and its next, not {tuple(tokens.shape)}")
        if chunk < 1:
            raise ValueError(f"loss: chunk must be a positive number of positions, not {chunk!r}")
        hidden = self.hidden(tokens[:, :-1]).flatten(0, 1).split(chunk)  # of (B * T, C)
        targets = tokens[:, 1:].flatten().long().split(chunk)
        losses = [
            checkpoint(self.summed_loss, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(hidden, targets, strict=True)
        ]
        return torch.stack(losses).sum() / tokens[:, 1:].numel()  # type: ignore[arg-type]

    def summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        try:
            return functional.cross_entropy(self.head(hidden), targets, reduction="sum", ignore_index=NONE)
        except IndexError:
            raise self.not_in_vocabulary(targets) from None

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt (batch, length) by `new_tokens`: (batch, length + new_tokens), the prompt included.

        `temperature` divides the logits (0: the most probable token); `top_k` leaves only so many to choose from.
        """
        if prompt.dim() == 2 and prompt.shape[1] == 0:
            raise ValueError("generate: the prompt is empty; give at least one token, such as a line break")
        self.refuse(prompt, before=0)
        if new_tokens < 0 or prompt.shape[1] + new_tokens > self.length:
            raise ValueError(
                f"generate: {prompt.shape[1]} tokens of prompt and {new_tokens} new ones; the model is for at most "
                f"{self.length}: shorten the prompt to its end, or build the model with a larger length"
            )
        if temperature < 0 or (top_k is not None and not 1 <= top_k <= self.vocabulary):
            raise ValueError(
                f"generate: temperature must be 0 or more and top_k between 1 and the vocabulary of {self.vocabulary}, "
                f"not {temperature!r} and {top_k!r}"
            )
        if self.training and self.dropout:
            raise RuntimeError("generate: the model is in training mode and would drop channels; call eval() first")
        cache, tokens, latest = Cache(prompt.shape[1] + new_tokens), [prompt], prompt
        for _ in range(new_tokens):
            logits = self.head(self.hidden(latest, cache)[:, -1]).float()  # (B, V)
            if top_k is not None:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
            if temperature == 0:
                latest = logits.argmax(-1, keepdim=True)
            else:
                latest = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            latest = latest.to(prompt.dtype)  # (B, 1)
            tokens.append(latest)
        return torch.cat(tokens, dim=1)

    def refuse(self, tokens: Tensor, before: int) -> None:
        """An error for tokens that the model cannot read after so many others."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"LanguageModel: tokens are ids in int64 or int32, not {tokens.dtype}; use tokens.long()")
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"LanguageModel: tokens must be (batch, 1 or more tokens), not {tuple(tokens.shape)}")
        if before + tokens.shape[1] > self.length:
            raise ValueError(
                f"LanguageModel: {before + tokens.shape[1]} tokens; the model is for at most {self.length}: cut them, "
                "or build the model with a larger length"
            )

    def not_in_vocabulary(self, tokens: Tensor) -> ValueError:
        """Raised where an operator has found it: to look at the values first would wait for the device. On CUDA the
        operator itself asserts."""
        return ValueError(
            f"LanguageModel: token ids must lie between 0 and {self.vocabulary - 1}, the vocabulary, not between "
            f"{tokens.min()} and {tokens.max()}"
        )


class Attention(nn.Module):
    """Causal attention. Positions come as a rotation; earlier tokens, when generating, from a cache of the caller."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = nn.RMSNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, cache: Cache | None = None) -> Tensor:  # (B, T, C)
        # (B, T, 3 C) -> three times (B, H, T, C / H)
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        causal = True
        if cache is not None:
            causal = cache.filled == 0  # the prompt; after it, one token that sees all before it
            k, v = cache.extend(self, k, v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # (B, H, T, C / H)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, C)
        return functional.dropout(mixed, self.dropout, self.training)


class FeedForward(nn.Module):
    """SwiGLU, with 8/3 of the width inside: as many weights as a plain feed-forward of four times the width."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        inside = 8 * math.ceil(width / 3)
        self.dropout = dropout
        self.norm = nn.RMSNorm(width)
        self.project, self.out = nn.Linear(width, 2 * inside, bias=False), nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        gate, value = self.project(self.norm(x)).chunk(2, dim=-1)  # each (B, T, 8/3 C)
        return functional.dropout(self.out(functional.silu(gate) * value), self.dropout, self.training)


class Cache:
    """Keys and values of the tokens seen so far, for each attention. It belongs to one call of `generate`."""

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self.stored: dict[Attention, tuple[Tensor, Tensor]] = {}  # each (B, H, length, C / H)

    def extend(self, attention: Attention, *new: Tensor) -> list[Tensor]:
        """Store the keys and values of new tokens; all of them so far."""
        if attention not in self.stored:
            batch, heads, _, width = new[0].shape
            keys, values = (tensor.new_empty(batch, heads, self.length, width) for tensor in new)
            self.stored[attention] = keys, values
        end = self.filled + new[0].shape[2]
        for stored, tensor in zip(self.stored[attention], new, strict=True):
            stored[:, :, self.filled : end] = tensor
        return [stored[:, :, :end] for stored in self.stored[attention]]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of channels: x (B, H, T, D), rotation (2, T, D / 2)."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
