"""The Reformer of transformers with its encoder on this engine: same weights and outputs, gradients everywhere."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pages import run_page
from torch import Tensor, nn
from transformers import ReformerConfig, ReformerModelWithLMHead
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import retrograd as rg
from retrograd.dropin.transformers import ReformerEncoder
from retrograd.measure import LiveBytes

LENGTH = 32


def published(depth: int = 4, kinds: tuple[str, ...] = ("local", "lsh"), **options: Any) -> ReformerModelWithLMHead:
    config = {
        "attn_layers": [*itertools.islice(itertools.cycle(kinds), depth)],
        "hidden_size": 16,
        "attention_head_size": 8,
        "num_attention_heads": 2,
        "feed_forward_size": 32,
        "vocab_size": 30,
        "axial_pos_embds": False,
        "max_position_embeddings": 64,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_hashes": 2,
        "num_buckets": 4,
        "hash_seed": 3,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "use_cache": False,
    }
    return ReformerModelWithLMHead(ReformerConfig(**config | options)).double()


def ours(model: ReformerModelWithLMHead, **options: Any) -> ReformerModelWithLMHead:
    model = copy.deepcopy(model)
    model.reformer.encoder = ReformerEncoder(model.reformer.encoder, **options)
    return model


def batch() -> dict[str, Tensor]:
    """The first sequence is padded at its end."""
    tokens, mask = torch.randint(30, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, -5:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def gradients(model: nn.Module, loss: Callable[[Any], Tensor], **given: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model.train()(**given)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_logits(out: Any) -> Tensor:
    return out.logits.sin().sum()


def test_same_weights_outputs_and_gradients() -> None:
    theirs, given = published(), batch()
    model = ours(theirs)
    assert [*model.state_dict()] == [*theirs.state_dict()]
    for mode in (True, False):
        assert torch.equal(model.train(mode)(**given).logits, theirs.train(mode)(**given).logits)
    expected = gradients(theirs, of_logits, **given)
    torch.testing.assert_close(gradients(model, of_logits, **given), expected, rtol=1e-9, atol=1e-9)
    assert len(expected) > 40


def test_hidden_states_carry_gradients() -> None:
    """The published ones are the same, but no gradient flows back through them."""

    def of_hidden_states(out: Any) -> Tensor:
        return sum((i + 1) * hidden.sin().sum() for i, hidden in enumerate(out.hidden_states))

    theirs, given = published(), batch() | {"output_hidden_states": True, "output_attentions": True}
    model, kept = ours(theirs), ours(theirs, policy=rg.Keep())
    out, expected = model(**given), theirs(**given)
    torch.testing.assert_close(out.hidden_states, expected.hidden_states, rtol=0, atol=0)
    torch.testing.assert_close(out.attentions, expected.attentions, rtol=0, atol=0)
    grads = gradients(model, of_hidden_states, **given)
    torch.testing.assert_close(grads, gradients(kept, of_hidden_states, **given), rtol=1e-9, atol=1e-9)
    assert any("layers.3" in name for name in grads)
    assert not any("layers" in name for name in gradients(theirs, of_hidden_states, **given))


@pytest.mark.parametrize("dropout", ["hidden_dropout_prob", "lsh_attention_probs_dropout_prob"])
def test_gradients_under_dropout(dropout: str) -> None:
    """The published backward does not hash again. What it draws next, for dropout, is not what the forward drew."""
    theirs, given = published(kinds=("lsh",), hash_seed=None, **{dropout: 0.3}).train(), batch()
    assert relative_error(theirs, given) > 1e-3
    assert relative_error(ours(theirs), given) < 1e-6


def relative_error(model: nn.Module, given: dict[str, Tensor]) -> float:
    """Of the derivative in a random direction of one weight, against a difference quotient."""
    weight = model.reformer.encoder.layers[-1].attention.self_attention.value.weight
    direction = torch.randn_like(weight)
    of_logits(in_the_same_draws(model, given)).backward()  # autograd.grad does not reach the published layers
    derivative = (weight.grad * direction).sum()
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            weight.add_(direction, alpha=step)
            values.append(of_logits(in_the_same_draws(model, given)))
    return (derivative / ((values[0] - values[1]) / 2e-5) - 1).abs().item()


def in_the_same_draws(model: nn.Module, given: dict[str, Tensor]) -> Any:
    """A call whose random numbers are always the same, though published layers draw a new seed by torch.seed()."""
    seeds = itertools.count(100)

    def seed() -> int:
        torch.manual_seed(number := next(seeds))
        return number

    torch.manual_seed(5)
    with mock.patch.object(torch, "seed", seed):
        return model(**given)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    """With find_unused_parameters, as a model with an optional head needs it. The published encoder fails."""
    theirs, given = published(), batch()
    model = ours(theirs)
    expected = gradients(model, of_logits, **given)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    found = gradients(wrapped, of_logits, **given)
    torch.testing.assert_close({f"module.{name}": grad for name, grad in expected.items()}, found)
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        gradients(nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True), of_logits, **given)


def test_what_the_published_encoder_refuses() -> None:
    """autograd.grad, eval mode, and another number of hashes than the configuration's."""
    theirs, given = published(), batch() | {"num_hashes": 3}
    model = ours(theirs)
    assert torch.equal(model(**given).logits, theirs(**given).logits)
    expected = gradients(ours(theirs, policy=rg.Keep()), of_logits, **given)
    torch.testing.assert_close(gradients(model, of_logits, **given), expected, rtol=1e-9, atol=1e-9)
    name = "reformer.encoder.layers.0.attention.self_attention.query.weight"
    (grad,) = torch.autograd.grad(of_logits(model.eval()(**given)), model.get_parameter(name))  # there is no dropout
    torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        gradients(theirs, of_logits, **given)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(of_logits(theirs.train()(**batch())), theirs.get_parameter(name))
    with pytest.raises(AssertionError, match="training mode"):
        of_logits(theirs.eval()(**batch())).backward()


def test_hashes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconstructed vector could fall into another bucket."""
    hashed, calls = LSHSelfAttention._hash_vectors, []
    monkeypatch.setattr(LSHSelfAttention, "_hash_vectors", lambda *args: calls.append(args[0]) or hashed(*args))
    model = ours(published(3, ("lsh",)))
    gradients(model, of_logits, **batch())
    assert calls == [layer.attention.self_attention for layer in model.reformer.encoder.layers]


@pytest.mark.parametrize(("kind", "held"), [("local", 0), ("lsh", 2)])
def test_memory(kind: str, held: int) -> None:
    """Local attention holds nothing; LSH attention two integers for each hash: its bucket, its place in a sort."""
    given, peaks = batch(), {}
    for depth in (2, 6):
        model = ours(published(depth, (kind,))).train()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as memory:
            of_logits(model(**given)).backward()
        peaks[depth] = memory.peak
    hashes = 2 * 2 * 2 * LENGTH  # sequences, heads, rounds, tokens
    assert peaks[6] - peaks[2] == 4 * held * hashes * 8


def test_cache() -> None:
    """Two tokens, one by one, after a prompt."""
    theirs, prompt = published(use_cache=True).eval(), torch.randint(30, (2, LENGTH))
    logits = []
    for model in (theirs, ours(theirs)):
        with torch.no_grad():
            out = model(prompt)
            for token in (4, 5):
                out = model(torch.full((2, 1), token), past_buckets_states=out.past_buckets_states)
        logits.append(out.logits)
    assert torch.equal(*logits)
    assert ours(theirs).train()(prompt).past_buckets_states is None


def test_cache_where_gradients_are_wanted() -> None:
    model, given = ours(published()).eval(), batch()
    weight = model.reformer.encoder.layers[0].feed_forward.dense.dense.weight
    (expected,) = torch.autograd.grad(of_logits(model(**given)), weight)
    out = model(**given, use_cache=True)
    (grad,) = torch.autograd.grad(of_logits(out), weight)
    torch.testing.assert_close(grad, expected)
    assert len(out.past_buckets_states) == 4


def test_page() -> None:
    run_page("coming-from/transformers-reformer.md")
