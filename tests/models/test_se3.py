"""The SE(3) network: gradients against a plain loop, rotations, translations, exchanges, reach, and what it holds."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from e3nn import o3
from torch import Tensor

import retrograd as rg
from retrograd.measure import LiveBytes
from retrograd.models.se3 import Features, SE3Transformer

BATCH, PARTICLES = 2, 6
Input = tuple[Features, Tensor]


def model(depth: int = 2, **options: Any) -> SE3Transformer:
    options = {"inputs": {0: 2, 1: 1}, "outputs": {0: 1, 1: 2, 2: 1}, "max_degree": 2, "cutoff": 4.0} | options
    return SE3Transformer(**options, depth=depth, width=8, heads=2)


def system(dtype: torch.dtype = torch.float64) -> Input:
    numbers, vectors = torch.randn(BATCH, PARTICLES, 2, 1), torch.randn(BATCH, PARTICLES, 1, 3)
    return {0: numbers.to(dtype), 1: vectors.to(dtype)}, torch.randn(BATCH, PARTICLES, 3).to(dtype)


def turned(features: Features, turn: Tensor) -> Features:
    """Features after a rotation: what it does to a degree is what it does to spherical harmonics of that degree."""
    x = torch.randn(50, 3, dtype=turn.dtype)
    out = {}
    for degree, each in features.items():
        before, after = (o3.spherical_harmonics(degree, points, normalize=False) for points in (x, x @ turn.T))
        out[degree] = each @ torch.linalg.lstsq(before, after).solution
    return out


def largest_difference(found: Features, expected: Features) -> float:
    assert found.keys() == expected.keys()
    return max((found[degree] - expected[degree]).abs().max().item() for degree in expected)


def gradients(net: SE3Transformer, features: Features, coordinates: Tensor) -> list[Tensor]:
    out = net(features, coordinates)
    loss = sum(each.sin().sum() for each in out.values())
    wanted = [*net.parameters(), *features.values(), coordinates]
    return [*(each.detach() for each in out.values()), *torch.autograd.grad(loss, wanted, materialize_grads=True)]


@pytest.mark.parametrize("options", [{"max_degree": 2, "neighbours": 3}, {"max_degree": 1, "outputs": {0: 1, 1: 1}}])
def test_gradients_are_those_of_a_plain_loop(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(depth=3, **options).double()
    features, coordinates = system()
    for tensor in (*features.values(), coordinates):
        tensor.requires_grad_()
    found = gradients(net, features, coordinates)

    def plain(x: Features, edges: Any) -> Features:
        a = b = x
        for f, g in net.blocks.pairs():
            a = {degree: a[degree] + out for degree, out in f(b, edges=edges).items()}
            b = {degree: b[degree] + out for degree, out in g(a).items()}
        return {degree: (a[degree] + b[degree]) / 2 for degree in a}

    monkeypatch.setattr(net.blocks, "forward", plain)
    torch.testing.assert_close(found, gradients(net, features, coordinates), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_rotations_and_translations(dtype: torch.dtype, error: float) -> None:
    net, (features, coordinates) = model().to(dtype), system(dtype)
    out = net(features, coordinates)
    assert min(each.std() for each in out.values()) > 0.01, "the test compares zeros"
    turn, move = o3.rand_matrix(dtype=dtype), 5 * torch.randn(3, dtype=dtype)
    torch.testing.assert_close(turned(features, turn)[1], features[1] @ turn.T, rtol=0, atol=error)  # plain vectors
    found = net(turned(features, turn), coordinates @ turn.T + move)
    assert largest_difference(found, turned(out, turn)) < error
    # Not E(3): a mirror image is another system, or forces with a cross product could not be learned.
    mirrored = net({0: features[0], 1: -features[1]}, -coordinates)
    assert (mirrored[1] + out[1]).abs().max() > 0.01


def test_exchanged_particles() -> None:
    net, (features, coordinates) = model(neighbours=3).double(), system()
    order = torch.randperm(PARTICLES)
    found = net({degree: each[:, order] for degree, each in features.items()}, coordinates[:, order])
    expected = {degree: each[:, order] for degree, each in net(features, coordinates).items()}
    assert largest_difference(found, expected) < 1e-10


def test_a_particle_hears_its_nearest_neighbours() -> None:
    """One block: the gradient reaches the particle itself and its three nearest, in its own system only."""
    net, (features, coordinates) = model(depth=1, neighbours=3).double(), system()
    features[0].requires_grad_()
    net(features, coordinates)[0][1, 2].sum().backward()
    assert features[0].grad is not None
    heard = features[0].grad.abs().sum((2, 3)) > 0
    nearest = (coordinates[1] - coordinates[1, 2]).norm(dim=-1).topk(4, largest=False).indices  # itself included
    expected = torch.zeros(BATCH, PARTICLES, dtype=torch.bool)
    expected[1, nearest] = True
    assert torch.equal(heard, expected)


def test_reach() -> None:
    """Beyond the cutoff there is no influence, at the cutoff it begins smoothly, and nothing heard is no NaN."""
    net, (features, coordinates) = model(cutoff=20.0).double(), system()

    def with_last_at(distance: float) -> Features:
        placed = torch.cat((coordinates[:, :-1] * 1e-3, torch.tensor([distance, 0.0, 0.0]).expand(BATCH, 1, 3)), 1)
        return net(features, placed.double())

    without_last = net({degree: each[:, :-1] for degree, each in features.items()}, coordinates[:, :-1] * 1e-3)
    first = [{d: each[:, :-1] for d, each in with_last_at(at).items()} for at in (19.0, 19.9, 20.1, 1000.0)]
    near, nearly, beyond, far = (largest_difference(found, without_last) for found in first)
    assert far < 1e-12
    assert beyond < 1e-12
    assert 1e-12 < nearly < near / 20
    assert all(each.isfinite().all() for each in with_last_at(1000.0).values())


def test_particles_in_one_place_have_finite_gradients() -> None:
    net, (features, coordinates) = model().double(), system()
    together = torch.zeros_like(coordinates, requires_grad=True)
    sum(each.square().sum() for each in net(features, together).values()).backward()
    assert together.grad is not None
    assert together.grad.isfinite().all()


def test_streams_stay_in_full_precision_under_autocast() -> None:
    net, (features, coordinates) = model(), system(torch.float32)
    kept = net(features, coordinates)
    seen = []
    net.blocks.register_forward_hook(lambda module, inputs, out: seen.extend(each.dtype for each in out.values()))
    with torch.autocast("cpu", torch.bfloat16):
        found = net(features, coordinates)
    assert set(seen) == {torch.float32}
    assert 1e-5 < largest_difference(found, kept) < 0.1


def test_memory_does_not_grow_with_depth() -> None:
    def peak(depth: int, policy: rg.Policy) -> int:
        net = model(depth, policy=policy, max_degree=1, outputs={0: 1, 1: 1})
        features, coordinates = system(torch.float32)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as memory:
            sum(each.square().sum() for each in net(features, coordinates).values()).backward()
        return memory.peak

    assert peak(8, rg.Reverse()) == peak(3, rg.Reverse())
    assert peak(8, rg.Keep()) > 4 * peak(8, rg.Reverse())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be a positive whole number, not 0"),
        ({"width": 6, "heads": 4}, "width 6 must be a multiple of the 4 heads"),
        ({"depth": 0}, "depth must be"),
        ({"neighbours": 0}, "neighbours must be a positive whole number, not 0"),
        ({"cutoff": 0.0}, "cutoff must be a positive finite distance, not 0.0"),
        ({"inputs": {2: 1}}, r"inputs must be \{degree: channels\} with degrees up to max_degree \(1\)"),
        ({"outputs": {0: 0}}, "outputs must be .* at least one channel each"),
        ({"inputs": {}}, "inputs must be"),
    ],
)
def test_what_no_model_can_be(options: dict[str, Any], message: str) -> None:
    given = {"inputs": {0: 1}, "outputs": {1: 1}, "depth": 1, "width": 4, "cutoff": 1.0} | options
    with pytest.raises(ValueError, match=message):
        SE3Transformer(**given)


def test_what_a_model_cannot_take() -> None:
    net, (features, coordinates) = model(), system(torch.float32)
    with pytest.raises(ValueError, match=r"features must have the degrees \[0, 1\], as integers, not \[0\]"):
        net({0: features[0]}, coordinates)
    with pytest.raises(ValueError, match=r"not \['0', '1'\]"):
        net({"0": features[0], "1": features[1]}, coordinates)
    with pytest.raises(ValueError, match=r"features of degree 1 must be .*channels, 3\).* not \(2, 6, 1, 5\)"):
        net({0: features[0], 1: torch.randn(BATCH, PARTICLES, 1, 5)}, coordinates)
    with pytest.raises(ValueError, match=r"coordinates must be \(batch, particles, 3\), not \(6, 3\)"):
        net(features, coordinates[0])
    with pytest.raises(ValueError, match="a single particle has no neighbours"):
        net({degree: each[:, :1] for degree, each in features.items()}, coordinates[:, :1])


def test_without_e3nn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e3nn", None)
    monkeypatch.delitem(sys.modules, "retrograd.models.se3")
    with pytest.raises(ImportError, match=r"pip install 'retrograd\[se3\]'"):
        importlib.import_module("retrograd.models.se3")
