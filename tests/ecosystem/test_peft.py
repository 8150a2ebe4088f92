"""LoRA adapters of peft inside f and g, and around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import run_page
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import retrograd as rg

TARGETS = ["project", "up", "down"]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("ecosystem/adapters-and-formats.md", until="safetensors")


def adapted(model: nn.Module) -> Any:
    """With adapters that do something from the start."""
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGETS, init_lora_weights=False))


def step(page: dict[str, Any], policy: rg.Policy) -> tuple[Any, dict[str, Tensor]]:
    """A model with adapters after one step in bf16, and the gradients of that step."""
    torch.manual_seed(0)
    model = adapted(page["Model"](join=rg.ExactAdd(), policy=policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(page["tokens"], page["mask"]).float().square().mean()
    loss.backward()
    optimizer.step()
    return model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_adapters_learn_as_with_kept_activations(page: dict[str, Any]) -> None:
    model, grads = step(page, rg.Reverse())
    _, kept = step(page, rg.Keep())
    assert set(grads) == {n for n, _ in model.named_parameters() if ".lora_A." in n or ".lora_B." in n}
    assert len(grads) == 2 * 3 * 2
    for name, grad in grads.items():
        assert torch.equal(grad, kept[name]), name
        assert grad.any(), name


def test_merged(page: dict[str, Any]) -> None:
    model, _ = step(page, rg.Reverse())
    model.eval()
    with torch.no_grad():
        before = model(page["tokens"], page["mask"])
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(page["tokens"], page["mask"]), before, rtol=1e-4, atol=1e-3)
    assert merged.state_dict().keys() == page["Model"]().state_dict().keys()
    assert type(merged) is page["Model"]


@pytest.mark.parametrize("around", ["f", "g", "f and g"])
def test_keywords_go_through_a_wrapper(page: dict[str, Any], around: str) -> None:
    """A PeftModel takes any keyword; f is given the mask all the same, and g is not."""
    f, g = page["Attention"](32), page["FeedForward"](32)
    f = adapted(f) if "f" in around else f
    g = adapted(g) if "g" in around else g
    net, x = rg.ReversibleSequence([(f, g)]), torch.randn(2, 8, 32)
    torch.manual_seed(1)
    y = net(x, mask=page["mask"])
    torch.manual_seed(1)
    a = x + f(x, mask=page["mask"])
    torch.testing.assert_close(y, (a + x + g(a)) / 2)
    with pytest.raises(TypeError, match="no network takes the keyword 'context'"):
        net(x, context=x)


def test_keywords_go_past_a_layer_with_an_adapter(page: dict[str, Any]) -> None:
    """g is itself a linear layer, so the adapter's layer takes its place."""
    net = nn.ModuleDict({"blocks": rg.ReversibleSequence([(page["Attention"](32), nn.Linear(32, 32))])})
    get_peft_model(net, LoraConfig(r=4, target_modules=r"blocks\.blocks\.0\.1"))
    net["blocks"](torch.randn(2, 8, 32), mask=page["mask"]).sum().backward()
    assert net["blocks"].blocks[0][1].lora_B["default"].weight.grad is not None
