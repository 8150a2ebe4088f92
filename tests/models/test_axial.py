"""Axial attention: against full attention and kept activations; the pixel model sees all that is before, no more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import retrograd as rg
from retrograd.models import AxialAttention, AxialClassifier, AxialPixels

LEVELS = 5


def full_attention(attention: AxialAttention, x: Tensor) -> Tensor:
    """With the weights of `attention`, over the whole sequence x (length, width), head by head."""
    q, k, v = attention.project(attention.norm(x)).chunk(3, dim=-1)
    heads = [
        functional.scaled_dot_product_attention(*(t[None] for t in head), is_causal=attention.causal)[0]
        for head in zip(*(t.chunk(attention.heads, dim=-1) for t in (q, k, v)), strict=True)
    ]
    return attention.out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("causal", [False, True])
def test_along_its_only_axis_it_is_full_attention(causal: bool) -> None:
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    attention = AxialAttention(8, 2, axis=0, causal=causal).double()
    expected = torch.stack([full_attention(attention, sequence) for sequence in x])
    torch.testing.assert_close(attention(x), expected)
    column = AxialAttention(8, 2, axis=1, causal=causal).double()  # seven places along the second of three axes
    column.load_state_dict(attention.state_dict())
    torch.testing.assert_close(column(x[:, None, :, None])[:, 0, :, 0], expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_along_an_axis_of_video_each_line_is_a_sequence(axis: int) -> None:
    x = torch.randn(2, 3, 4, 5, 8, dtype=torch.float64)
    attention = AxialAttention(8, 2, axis).double()
    lines = x.movedim(1 + axis, -2)
    expected = torch.empty_like(lines)
    for place in torch.cartesian_prod(*map(torch.arange, lines.shape[:3])).tolist():
        expected[tuple(place)] = full_attention(attention, lines[tuple(place)]).detach()
    torch.testing.assert_close(attention(x), expected.movedim(-2, 1 + axis))


def image_classifier(**options: Any) -> tuple[torch.nn.Module, Tensor]:
    return AxialClassifier((4, 5), 3, 7, 3, 8, heads=2, **options), torch.randn(2, 4, 5, 3)


def video_classifier(**options: Any) -> tuple[torch.nn.Module, Tensor]:
    return AxialClassifier((3, 4, 2), 1, 7, 4, 8, heads=2, **options), torch.randn(2, 3, 4, 2, 1)


def image_pixels(**options: Any) -> tuple[torch.nn.Module, Tensor]:
    return AxialPixels((4, 3), LEVELS, 2, 8, heads=2, **options), torch.randint(LEVELS, (2, 4, 3))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("build", [image_classifier, video_classifier, image_pixels])
def test_gradients_are_those_of_kept_activations(build: Any, dropout: float) -> None:
    model, x = build(dropout=dropout)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    found = []
    for policy in (rg.Reverse(), rg.Keep()):
        for module in model.modules():
            if isinstance(module, rg.Reversible):
                module.policy = policy
        torch.manual_seed(1)
        found.append(torch.autograd.grad(model(x).sin().square().sum(), list(model.parameters())))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert all(gradient.abs().max() > 1e-9 for gradient in found[1])


@pytest.mark.parametrize("shape", [(7,), (4, 3), (3, 2, 3)], ids=str)
def test_a_value_changes_every_logit_after_it_and_no_other(shape: tuple[int, ...]) -> None:
    model = AxialPixels(shape, LEVELS, len(shape), 8, heads=2).double()
    values, places = torch.randint(LEVELS, (1, *shape)), math.prod(shape)
    others = values.flatten().repeat(places, 1)
    others[range(places), range(places)] += 1
    others %= LEVELS  # in row i, the value at place i is another
    with torch.no_grad():
        before = model(values).view(places, LEVELS)
        after = torch.cat([model(other.view(1, *shape)).view(1, places, LEVELS) for other in others])
    changed = (after - before).abs().amax(-1)  # (changed place, place of the logit)
    later = torch.ones(places, places, dtype=torch.bool).triu(1)
    assert (changed[~later] == 0).all()
    assert (changed[later] > 1e-9).all()


def test_pixels_are_drawn_from_their_logits() -> None:
    """A model that has learnt one image by heart draws it."""
    model, image = AxialPixels((3, 3), LEVELS, 2, 16), torch.randint(LEVELS, (1, 3, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(image)
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    drawn = model.generate(5, temperature=0.2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, image.expand(5, 3, 3))


def test_activations_do_not_grow_with_depth() -> None:
    images = torch.randn(4, 8, 8, 1)

    def activations(depth: int, policy: rg.Policy) -> int:
        return rg.measure(AxialClassifier((8, 8), 1, 10, depth, 32, policy=policy), images).activations

    assert activations(4, rg.Reverse()) == activations(12, rg.Reverse())
    assert activations(12, rg.Keep()) > 2.5 * activations(4, rg.Keep())


def test_models_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="depth 2 for 3 axes; each block attends along one axis, so at least 3"):
        AxialPixels((4, 4, 3), LEVELS, 2, 8)
    with pytest.raises(ValueError, match="width 9 must be a multiple of the number of heads, not of 2"):
        AxialClassifier((4, 4), 1, 10, 2, 9, heads=2)
    with pytest.raises(ValueError, match=r"the length of each axis, such as \(8, 8\), not \(\)"):
        AxialClassifier((), 1, 10, 2, 8)
    for shape, width, options, message in (
        (8, 8, {}, r"such as \(8, 8\), not 8"),
        ((4, 4), 0, {}, "width must be a positive whole number, not 0"),
        ((4, 4), 8, {"heads": 2.0}, "heads must be a positive whole number, not 2.0"),
        ((4, 4), 8, {"classes": 0}, "classes must be a positive whole number, not 0"),
        ((4, 4), 8, {"depth": 2.5}, "depth must be a positive whole number, not 2.5"),
    ):
        with pytest.raises(ValueError, match=message):
            AxialClassifier(shape, **({"channels": 1, "classes": 10, "depth": 2, "width": width} | options))
    with pytest.raises(ValueError, match="dropout must be a probability below 1"):
        AxialClassifier((4, 4), 1, 10, 2, 8, dropout=1.5)


def test_inputs_that_cannot_be_read() -> None:
    classifier, x = image_classifier()
    with pytest.raises(ValueError, match=r"expects \(batch, 4, 5, 3\).* the channels last, not \(2, 3, 4, 5\)"):
        classifier(x.movedim(-1, 1))
    pixels, values = image_pixels()
    with pytest.raises(ValueError, match=r"of shape \(batch, 4, 3\), not torch.int64 of shape \(2, 3, 4\)"):
        pixels(values.mT)
    with pytest.raises(ValueError, match=r"whole numbers.*not torch.float32"):
        pixels(values.float())
    with pytest.raises(ValueError, match="between 0 and 4, not between 5 and 5"):
        pixels(torch.full((1, 4, 3), 5))
