"""Plain residual models of transformers, made reversible: their layers as a Midpoint or a Momentum stack."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import run_page
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import retrograd as rg
from retrograd.dropin.transformers import Layers
from retrograd.measure import LiveBytes

SIZES = {"hidden_size": 16, "num_attention_heads": 2}
TEXT = {"vocab_size": 40, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
STEADY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

BUILD: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": lambda depth=5, **options: GPT2LMHeadModel(GPT2Config(num_hidden_layers=depth, **SIZES, **TEXT, **options)),
    "llama": lambda depth=5, **options: LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=depth, num_key_value_heads=1, intermediate_size=32, **SIZES, **TEXT, **options)
    ),
    "bloom": lambda depth=5, **options: BloomForCausalLM(
        BloomConfig(n_layer=depth, n_head=2, **SIZES, **TEXT, **options)
    ),
    "vit": lambda depth=5, **options: ViTForImageClassification(
        ViTConfig(num_hidden_layers=depth, intermediate_size=32, image_size=16, patch_size=4, **SIZES, **options)
    ),
}
PLACE = {
    "gpt2": ("transformer", "h"),
    "bloom": ("transformer", "h"),
    "llama": ("model", "layers"),
    "vit": ("vit", "layers"),
}
RECIPES = {"midpoint": rg.Midpoint.from_residual, "momentum": rg.Momentum.from_residual}
LANGUAGE = ["gpt2", "llama", "bloom"]

models = pytest.mark.parametrize("name", BUILD)
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def layers_of(name: str, model: nn.Module) -> Any:
    parent, attribute = PLACE[name]
    return getattr(getattr(model, parent), attribute)


def put(name: str, model: nn.Module, layers: nn.Module) -> nn.Module:
    parent, attribute = PLACE[name]
    setattr(getattr(model, parent), attribute, layers)
    return model


def reversible(name: str, model: nn.Module, recipe: Callable[..., Any], **options: Any) -> Any:
    return put(name, model, Layers(recipe(layers_of(name, model), **options)))


def batch_for(name: str) -> dict[str, Any]:
    """With padding on the left where there is an attention mask."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens, mask = torch.randint(2, 40, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}


class PlainLoop(nn.Module):
    """What a recipe computes, with whatever the model gives its layers; bloom's return tuples."""

    def __init__(self, layers: nn.ModuleList, recipe: Any) -> None:
        super().__init__()
        self.layers, self.midpoint = layers, recipe == rg.Midpoint.from_residual

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, v = x, torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            out = layer(x, *args, **kwargs)
            added = (out[0] if isinstance(out, tuple) else out) - x
            v = 0.9 * v + (1 - 0.9) * added
            before, x = x, (before + min(index + 1, 2) * added) if self.midpoint else (x + v)
        return (x,) if isinstance(out, tuple) else x


@models
@recipes
def test_computes_and_learns_as_a_plain_loop(name: str, recipe: Any) -> None:
    """Masks and position embeddings included: the plain loop is given all that the model gives its layers."""
    plain, batch = BUILD[name](), batch_for(name)
    ours = reversible(name, copy.deepcopy(plain), recipe)
    expected = put(name, copy.deepcopy(plain), nn.ModuleList([PlainLoop(layers_of(name, plain), recipe)]))
    results = []
    for model in (ours, expected):
        torch.manual_seed(1)  # for dropout
        out = model.train()(**batch)
        out.loss.backward()
        parameters = [*model.parameters()]
        results.append([out.logits, *(parameter.grad for parameter in parameters)])
    assert all(grad is not None and grad.any() for grad in results[0][1:])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(ours.eval()(**batch).logits, plain.eval()(**batch).logits, atol=1e-3)


@models
def test_weights_keep_their_names(name: str, tmp_path: Path) -> None:
    plain = BUILD[name]()
    model = reversible(name, copy.deepcopy(plain), rg.Midpoint.from_residual)
    assert [*model.state_dict()] == [*plain.state_dict()]
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert isinstance(layers_of(name, again), nn.ModuleList)
    again, batch = reversible(name, again, rg.Midpoint.from_residual), batch_for(name)
    assert torch.equal(model.eval()(**batch).logits, again.eval()(**batch).logits)


@models
@recipes
def test_memory_does_not_grow_with_depth(name: str, recipe: Any) -> None:
    batch, peaks = batch_for(name), {}
    options = STEADY if name == "gpt2" else {}
    for policy in (rg.Reverse(), rg.Keep()):
        for depth in (3, 9):
            model = reversible(name, BUILD[name](depth, **options), recipe, policy=policy).train()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with LiveBytes() as memory:
                model(**batch).loss.backward()
            peaks[policy, depth] = memory.peak
    assert peaks[rg.Reverse(), 9] == peaks[rg.Reverse(), 3]
    assert peaks[rg.Keep(), 9] > 2 * peaks[rg.Keep(), 3]


@pytest.mark.parametrize("name", LANGUAGE)
def test_generation_with_a_cache(name: str) -> None:
    """Each layer fills its own part of the cache: token by token, the logits are those of a run without one."""
    model, prompt = reversible(name, BUILD[name](), rg.Midpoint.from_residual).eval(), torch.randint(2, 40, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with_cache, without = (
        model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=use_cache, **options)
        for use_cache in (True, False)
    )
    assert with_cache.past_key_values.get_seq_length() == 12
    assert len(with_cache.logits) == 6
    torch.testing.assert_close(with_cache.logits, without.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_cache_where_gradients_are_wanted(name: str) -> None:
    """A replay would write into it again. So activations are kept, and a warning says what to do."""
    model, batch = reversible(name, BUILD[name](), rg.Midpoint.from_residual).eval(), batch_for(name)
    model(**batch).loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"model\.config\.use_cache = False"):
        out = model(**batch | {"use_cache": True})
    out.loss.backward()
    assert out.past_key_values.get_seq_length() == 12
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_adapters_and_the_trainer(tmp_path: Path) -> None:
    """peft finds the layers by the names they had; the Trainer trains them in bf16, as with kept activations."""
    weights = []
    for policy in (rg.Reverse(), rg.Keep()):
        torch.manual_seed(0)
        model = reversible("llama", BUILD["llama"](), rg.Midpoint.from_residual, join=rg.ExactAdd(), policy=policy)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=[1, 3])
        adapted = get_peft_model(model, config)
        data = [{"input_ids": torch.randint(2, 40, (12,)), "labels": torch.randint(2, 40, (12,))} for _ in range(8)]
        arguments = TrainingArguments(
            tmp_path, use_cpu=True, bf16=True, max_steps=3, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        Trainer(adapted, arguments, train_dataset=data).train()
        weights.append({key: value for key, value in adapted.state_dict().items() if "lora_" in key})
    assert len(weights[0]) == 2 * 2 * 2
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert any(value.any() for key, value in weights[0].items() if "lora_B" in key)


def test_a_layer_that_is_replaced() -> None:
    model, batch = reversible("llama", BUILD["llama"](), rg.Midpoint.from_residual).eval(), batch_for("llama")
    before = model(**batch).logits
    model.model.layers.add_module("2", copy.deepcopy(model.model.layers[2]))
    assert torch.equal(model(**batch).logits, before)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.add_(1.0)
    assert not torch.equal(model(**batch).logits, before)


def test_what_is_refused() -> None:
    layers = reversible("llama", BUILD["llama"](), rg.Midpoint.from_residual).model.layers
    assert len(layers) == 5
    with pytest.raises(ValueError, match="it cannot be cut"):
        layers[:3]
    with pytest.raises(TypeError, match="made by Midpoint"):
        Layers(rg.Midpoint([nn.Linear(4, 4)]))


def test_page() -> None:
    run_page("ecosystem/residual.md")
