"""safetensors, torch.export, ONNX, torchao and parametrisations, on the model of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from pages import run_page
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

import retrograd as rg

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name. length will not be used:UserWarning"),
]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("ecosystem/adapters-and-formats.md")


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor]:
    """Another batch and another length than the page's."""
    return torch.randint(50, (3, 11)), torch.ones(11, 11, dtype=torch.bool).tril()


def test_safetensors(page: dict[str, Any], given: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, other = page["Model"](), page["Model"]()
    save_file(model.state_dict(), tmp_path / "one")
    other.load_state_dict(load_file(tmp_path / "one"))
    assert torch.equal(model(*given), other(*given))


def test_safetensors_of_shared_weights(tmp_path: Path) -> None:
    def tied() -> rg.ReversibleSequence:
        shared = nn.Linear(4, 4)
        return rg.ReversibleSequence([(shared, nn.Linear(4, 4)), (shared, nn.Linear(4, 4))])

    model, other, x = tied(), tied(), torch.randn(2, 4)
    save_model(model, str(tmp_path / "one"))
    load_model(other, str(tmp_path / "one"))
    assert torch.equal(model(x), other(x))
    assert other.blocks[0][0] is other.blocks[1][0]


def test_exported(page: dict[str, Any], given: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(page["program"].module()(*given), page["model"](*given))


def test_onnx(page: dict[str, Any], given: tuple[Tensor, Tensor]) -> None:
    assert_same_logits(page["session"], page["model"], given, 1e-5)


def test_exact_network_exported_and_onnx(page: dict[str, Any], given: tuple[Tensor, Tensor]) -> None:
    """The grid of ExactAdd becomes ordinary operators."""
    model = page["Model"](join=rg.ExactAdd()).eval()
    program = torch.export.export(model, (page["tokens"], page["mask"]), dynamic_shapes=page["shapes"])
    assert torch.equal(program.module()(*given), model(*given))
    onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(onnx.model_proto.SerializeToString())
    assert_same_logits(session, model, given, 10 * rg.ExactAdd().grid)  # another rounding, another point


def assert_same_logits(
    session: onnxruntime.InferenceSession, model: nn.Module, given: tuple[Tensor, Tensor], error: float
) -> None:
    tokens, mask = given
    (logits,) = session.run(None, {"tokens": tokens.numpy(), "mask": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(tokens, mask), rtol=0, atol=error)


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()],
    ids=lambda config: type(config).__name__,
)
def test_quantised(page: dict[str, Any], config: Any) -> None:
    """A program over quantised networks adds what they return, no more and no less."""
    f, g = page["Attention"](32), page["FeedForward"](32)
    net = rg.ReversibleSequence([(f, g)], split=-1, merge="concat").eval()
    x, mask = torch.randn(2, 8, 64), page["mask"]
    with torch.no_grad():
        full = net(x, mask=mask)
        quantize_(net, config)
        y = net(x, mask=mask)
        a, b = x.chunk(2, -1)
        a = a + f(b, mask)
        assert torch.equal(y, torch.cat([a, b + g(a)], -1))
        assert f.project.weight.qdata.dtype == g.up.weight.qdata.dtype == torch.int8
        assert 0 < (y - full).norm() < 0.01 * full.norm()
        # Quantised activations jump where a reconstructed one falls on the other side of a step.
        error = 1e-5 if isinstance(config, Int8WeightOnlyConfig) else 1e-2
        torch.testing.assert_close(net.inverse(y, mask=mask), x, rtol=0, atol=error)


def test_weight_norm(page: dict[str, Any]) -> None:
    grads = []
    for policy in (rg.Reverse(), rg.Keep()):
        torch.manual_seed(0)
        model = page["Model"](policy=policy).double()
        for f, g in model.blocks.pairs():
            weight_norm(f.project)
            weight_norm(g.up)
        model(page["tokens"], page["mask"]).sin().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert sum("parametrizations" in name for name in grads[0]) == 2 * 2 * 2
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
