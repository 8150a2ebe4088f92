"""The language model: against kept activations, causal, equal with and without a cache, and small in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.models import LanguageModel
from retrograd.models.lm import Cache, rotate


def build(depth: int = 3, width: int = 16, **options: Any) -> LanguageModel:
    options = {"vocabulary": 11, "heads": 2, "length": 12} | options
    return LanguageModel(depth, width, **options).double()


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 11) -> Tensor:
    return torch.randint(vocabulary, (batch, length))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("join", [rg.Add(), rg.ExactAdd()], ids=["Add", "ExactAdd"])
def test_gradients_are_those_of_kept_activations(dropout: float, join: rg.Join) -> None:
    model, x = build(dropout=dropout, join=join), tokens()
    found = {}
    for policy in (rg.Reverse(), rg.Keep()):
        model.blocks.policy = policy
        torch.manual_seed(1)
        found[policy] = torch.autograd.grad(model.loss(x), list(model.parameters()))
    reversed_, kept = found.values()
    torch.testing.assert_close(reversed_, kept, rtol=1e-10, atol=1e-12)
    assert all(gradient.abs().max() > 1e-6 for gradient in kept)


def test_dropout_drops_in_training_alone() -> None:
    model, x = build(dropout=0.4), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_a_token_changes_no_logit_before_it() -> None:
    model, x = build(), tokens(1)
    with torch.no_grad():
        before = model(x)
        for place in range(12):
            other = x.clone()
            other[0, place] = (x[0, place] + 1) % 11
            changed = (model(other) - before).abs().amax(-1)[0]  # (length,)
            assert (changed[:place] == 0).all()
            assert (changed[place:] > 1e-9).all()  # and every one from there on


def test_positions_count_from_each_other() -> None:
    """Rotary positions: what attention sees of two tokens depends on how far they are apart."""
    model, q, k = build(), torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def product(of_query: int, of_key: int) -> Tensor:
        at = [model.rotation(place, 1, q.device) for place in (of_query, of_key)]
        return rotate(q[None], at[0])[0] @ rotate(k[None], at[1])[0]

    torch.testing.assert_close(product(5, 2), product(9, 6), rtol=1e-5, atol=1e-5)
    assert abs(product(5, 2) - product(2, 5)) > 1e-3


def test_logits_with_a_cache_are_those_without() -> None:
    model, x = build(), tokens()
    cache = Cache(12)
    with torch.no_grad():
        pieces = [model.hidden(piece, cache) for piece in x.split([5, *[1] * 7], dim=1)]
        torch.testing.assert_close(model.head(torch.cat(pieces, 1)), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3}], ids=str)
def test_generate_draws_from_the_uncached_logits(options: dict[str, Any]) -> None:
    model, prompt = build(), tokens(3, 4)
    written = model.generate(prompt, 8, generator=torch.Generator().manual_seed(5), **options)
    expected, generator = prompt, torch.Generator().manual_seed(5)
    for _ in range(8):
        logits = model(expected)[:, -1].float()
        if "top_k" in options:
            least = logits.sort(descending=True).values[:, 2:3]
            logits = torch.where(logits < least, -math.inf, logits)
        if options.get("temperature") == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial((logits / options.get("temperature", 1.0)).softmax(-1), 1, generator=generator)
        expected = torch.cat((expected, new), 1)
    assert torch.equal(written, expected)
    assert torch.equal(model.generate(prompt, 0), prompt)


@pytest.mark.parametrize("chunk", [1, 5, 22, 1000])
def test_loss_in_chunks_is_the_whole_loss(chunk: int) -> None:
    model, x = build(), tokens()
    parameters = list(model.parameters())
    whole = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    in_chunks = model.loss(x, chunk=chunk)
    torch.testing.assert_close(in_chunks, whole)
    torch.testing.assert_close(torch.autograd.grad(in_chunks, parameters), torch.autograd.grad(whole, parameters))


def test_logits_are_never_all_alive() -> None:
    model = LanguageModel(1, 16, vocabulary=1024, length=128)
    x = tokens(4, 129, 1024)
    logits = 4 * 128 * 1024 * 4  # bytes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = {}
    for chunk in (32, 512):
        with LiveBytes() as memory:
            model.loss(x, chunk=chunk).backward()
        peaks[chunk] = memory.peak
    assert peaks[512] > logits
    assert peaks[32] < logits / 2


def test_activations_do_not_grow_with_depth() -> None:
    x = tokens(4, 65)

    def activations(depth: int, policy: rg.Policy) -> int:
        model = LanguageModel(depth, 32, vocabulary=11, length=64, policy=policy)
        return rg.measure(model.loss, x).activations

    assert activations(2, rg.Reverse()) == activations(9, rg.Reverse())
    assert activations(9, rg.Keep()) > 3 * activations(2, rg.Keep())


def test_deep_and_shallow_models_start_alike() -> None:
    """What 200 blocks add to the streams is no larger than what 4 add, so both train with one learning rate."""
    x = tokens(2, 16)
    sizes, slopes = [], []
    for depth in (4, 200):
        model = LanguageModel(depth, 32, vocabulary=11, length=16)
        with torch.no_grad():
            sizes.append(model.blocks(model.embed(x), rotation=model.rotation(0, 16, x.device)).std().item())
        model.loss(x).backward()
        slopes.append(model.embed.weight.grad.norm().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.5)
    assert slopes[1] == pytest.approx(slopes[0], rel=0.5)


def test_no_token_is_ignored() -> None:
    """-100 is torch's word for a target that does not count; here it is no token."""
    tokens = torch.randint(20, (1, 9))
    tokens[0, -1] = -100
    with pytest.raises(ValueError, match="between 0 and 19"):
        LanguageModel(2, 16, vocabulary=20, length=16).loss(tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"width": 18, "heads": 4}, "width 18 must be an even number of channels for each of 4 heads.*multiple of 8"),
        ({"width": 18, "heads": 6}, "width 18 must be an even number of channels for each of 6 heads.*multiple of 12"),
        ({"heads": 0}, "heads must be a positive whole number, not 0"),
        ({"heads": 2.0}, "heads must be a positive whole number, not 2.0"),
        ({"depth": 0}, "depth must be a positive whole number, not 0"),
        ({"dropout": 1.0}, "dropout must be a probability below 1"),
    ],
)
def test_models_that_cannot_be(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        build(**options)


@pytest.mark.parametrize(
    ("bad", "error", "expected"),
    [
        (tokens(1, 13), ValueError, "13 tokens; the model is for at most 12"),
        (torch.tensor([[3, 11]]), ValueError, "between 0 and 10, the vocabulary, not between 3 and 11"),
        (torch.tensor([[-1, 3]]), ValueError, "between 0 and 10"),
        (torch.zeros(1, 3), TypeError, r"int64 or int32, not torch.float32; use tokens.long\(\)"),
        (tokens()[0], ValueError, r"must be \(batch, 1 or more tokens\), not \(12,\)"),
    ],
)
def test_tokens_that_cannot_be_read(bad: Tensor, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        build()(bad)


def test_prompts_that_cannot_be_continued() -> None:
    model = build(dropout=0.1).eval()
    with pytest.raises(ValueError, match="prompt is empty; give at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="10 tokens of prompt and 3 new ones; the model is for at most 12"):
        model.generate(tokens(1, 10), 3)
    with pytest.raises(ValueError, match=r"top_k between 1 and the vocabulary of 11, not 1\.0 and 12"):
        model.generate(tokens(1, 10), 1, top_k=12)
    with pytest.raises(RuntimeError, match=r"call eval\(\) first"):
        model.train().generate(tokens(1, 10), 1)
    with pytest.raises(ValueError, match="between 0 and 10, the vocabulary"):
        model.loss(torch.tensor([[3, 11]]))  # the last token is only a target
    with pytest.raises(ValueError, match="a token and its next"):
        model.loss(tokens(1, 1))
