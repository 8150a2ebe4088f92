"""The models of the four packages, with their own classes and with ours: same outputs, same gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import plain
import published
import pytest
import torch
from published import MODELS, Model
from torch import Tensor

import retrograd as rg
import retrograd.dropin


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything in float64, also nuwa's softmax, which asks for float32."""
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim, dtype=None: torch.softmax(scores, dim))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def plain_classes() -> Iterator[None]:
    """The plain loops in the packages, where `install` puts our classes."""
    with pytest.MonkeyPatch.context() as patch:
        for key, (home, name) in published.HOMES.items():
            patch.setattr(home, name, plain.CLASSES[key])
        yield


CLASSES = {
    "published": contextlib.nullcontext,
    "plain": plain_classes,
    "ours": retrograd.dropin.install,
    "kept": retrograd.dropin.install,
}


def build(name: str, classes: str, dropout: float, **options: Any) -> Model:
    """A model with weights that depend on nothing but its name and options."""
    with CLASSES[classes]():
        torch.manual_seed(0)
        model = MODELS[name](dropout, **options)
    reversible = [module for module in model.module.modules() if isinstance(module, rg.Reversible)]
    assert bool(reversible) == (classes in ("ours", "kept"))
    for module in reversible if classes == "kept" else []:
        module.policy = rg.Keep()
    return model


def train(model: Model, *, seed: int = 1) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The outputs of a step, and the gradient of each parameter and input."""
    model.module.zero_grad()
    outputs, loss, inputs = model.step(seed)
    loss.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return [out.detach() for out in outputs], gradients | {f"input {name}": x.grad for name, x in inputs.items()}


def assert_outputs_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def assert_gradients_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Within 1e-6 of the norm of each gradient; what is zero but for rounding (attention biases) stays so."""
    largest = max(grad.norm().item() for grad in expected.values() if grad is not None)
    assert found.keys() == expected.keys()
    assert any(grad is not None for grad in expected.values())
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            assert (got - want).norm() <= 1e-6 * want.norm() + 1e-13 * largest, name


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, mode: str) -> None:
    found = {}
    for classes in CLASSES:
        model = build(name, classes, dropout=0.2)
        model.module.train(mode == "training")
        if classes == "published" and mode == "eval":
            with torch.no_grad():
                outputs, _, _ = model.step()
            found[classes] = outputs, {}  # its backward raises
        else:
            found[classes] = train(model)
    outputs, gradients = found["ours"]
    assert_outputs_equal(outputs, found["published"][0])
    assert_outputs_equal(outputs, found["plain"][0])
    assert_gradients_equal(gradients, found["plain"][1])
    assert_gradients_equal(gradients, found["kept"][1])
    if mode == "training":
        assert_gradients_equal(gradients, found["published"][1])


@pytest.mark.parametrize(
    "options",
    [
        {"layer_dropout": 0.5, "depth": 4},
        {"reverse_thres": 32},
        {"reverse_thres": 31},
        {"weight_tie": True},
        {"use_full_attn": True},
    ],
    ids=lambda options: next(iter(options)) + str(options.get("reverse_thres", "")),
)
def test_options_of_reformer(options: dict[str, Any]) -> None:
    found = {classes: train(build("ReformerLM", classes, 0.2, **options)) for classes in ("published", "plain", "ours")}
    outputs, gradients = found["ours"]
    for other in ("published", "plain"):
        assert_outputs_equal(outputs, found[other][0])
        assert_gradients_equal(gradients, found[other][1])


def test_reformer_in_eval_mode_after_training() -> None:
    """Its LSH attention keeps the buckets of the last training forward. They are not those of an eval forward."""
    found = {}
    for classes in ("plain", "ours"):
        model = build("ReformerLM", classes, dropout=0.0)
        train(model, seed=1)
        model.module.eval()
        found[classes] = train(model, seed=2)
    assert_outputs_equal(found["ours"][0], found["plain"][0])
    assert_gradients_equal(found["ours"][1], found["plain"][1])


def test_reformer_twice_before_a_backward() -> None:
    """The second forward chooses other buckets. The backward of the first must not see them."""
    found = {}
    for classes in ("plain", "ours"):
        model = build("ReformerLM", classes, dropout=0.2)
        losses = [model.step(seed)[1] for seed in (1, 2)]
        sum(losses).backward()
        found[classes] = {name: p.grad for name, p in model.module.named_parameters()}
    assert_gradients_equal(found["ours"], found["plain"])


@pytest.mark.parametrize("text_dropout", [0.2, 1.0])
@pytest.mark.parametrize("name", ["NUWA", "NUWAVideoAudio"])
def test_nuwa_with_dropped_text(name: str, text_dropout: float) -> None:
    """nuwa drops texts, by default a fifth of them, by changing their mask in place after the encoder has read it.

    Plain autograd allows it, since attention has saved what it made of the mask. A replay must not see the change.
    """
    found = {classes: train(build(name, classes, 0.2, text_dropout=text_dropout)) for classes in CLASSES}
    for other in ("plain", "published", "kept"):
        assert_outputs_equal(found["ours"][0], found[other][0])
        assert_gradients_equal(found["ours"][1], found[other][1])


def test_se3_without_reversibility() -> None:
    """`SequentialSequence`, which `reversible=False` selects."""
    found = {}
    for classes in ("published", "ours"):
        with CLASSES[classes]():
            torch.manual_seed(0)
            found[classes] = train(MODELS["SE3Transformer"](0.0, reversible=False))
    torch.testing.assert_close(found["ours"], found["published"], rtol=0, atol=0)
