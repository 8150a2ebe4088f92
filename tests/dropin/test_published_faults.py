"""What is wrong with the five published classes, one test for each fault: the published class shows it, ours does not.

The reference is the plain loop (plain.py). In float32 ours agrees with it within `EXACT`; each fault is far from that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import CASES, LENGTH, WIDTH, BatchNormLast, Case, Net, data, error, gradients, loss_of, networks, networks_of
from torch import Tensor, nn

EXACT = 1e-5

pytestmark = pytest.mark.parametrize("case", CASES, ids=repr)

Step = Callable[[str], dict[str, Tensor]]
"""Gradients of a variant."""


def assert_only_ours_is_right(step: Step, at_least: float = 0.02) -> None:
    """Ours agrees with the plain loop; the published class silently does not."""
    expected = step("plain")
    assert error(step("ours"), expected) < EXACT
    assert error(step("published"), expected) > at_least


def assert_only_ours_runs(step: Step, kind: type[Exception], message: str) -> None:
    """Ours agrees with the plain loop; the published class raises."""
    assert error(step("ours"), step("plain")) < EXACT
    with pytest.raises(kind, match=message):
        step("published")


def train(case: Case, sequence: nn.Module, x: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
    """One step from a fixed seed."""
    torch.manual_seed(5)
    loss_of(case.run(sequence, data() if x is None else x, **kwargs)).backward()
    return gradients(sequence)


def test_no_fault(case: Case) -> None:
    """One forward, one backward, in training, with dropout: where the published classes are right, and so is ours."""
    expected = train(case, case.build("plain", networks(dropout=0.2)))
    for variant in ("published", "ours"):
        assert error(train(case, case.build(variant, networks(dropout=0.2))), expected) < EXACT


def test_input_that_needs_no_grad(case: Case) -> None:
    """Embedded tokens of a frozen embedding, or an image: no parameter is trained."""
    assert_only_ours_is_right(lambda variant: trained_behind_a_head(case, variant), at_least=0.99)


def trained_behind_a_head(case: Case, variant: str) -> dict[str, Tensor]:
    sequence, head = case.build(variant), nn.Linear(WIDTH, WIDTH)
    loss_of(head(case.run(sequence, data(requires_grad=False)))).backward()
    assert head.weight.grad is not None
    return gradients(sequence)


def test_autograd_grad_of_parameters(case: Case) -> None:
    def step(variant: str) -> dict[str, Tensor]:
        sequence = case.build(variant)
        used = {name: p for name, p in sequence.named_parameters() if ".read." not in name}
        found = torch.autograd.grad(loss_of(case.run(sequence, data())), list(used.values()))
        assert not gradients(sequence)
        return dict(zip(used, found, strict=True))

    assert_only_ours_runs(step, RuntimeError, "not have been used in the graph")


def test_autograd_grad_of_the_input(case: Case) -> None:
    """It writes `.grad` of every parameter."""
    found, written = {}, {}
    for variant in ("plain", "ours", "published"):
        sequence, x = case.build(variant), data()
        (found[variant],) = torch.autograd.grad(loss_of(case.run(sequence, x)), x)
        written[variant] = len(gradients(sequence))
    torch.testing.assert_close(found["ours"], found["plain"])
    assert written["plain"] == written["ours"] == 0
    assert written["published"] > 0


def with_context(case: Case, variant: str, arrivals: list[Tensor], to_g: bool = False) -> dict[str, Tensor]:
    """A step with a context that an encoder made. `arrivals`: the gradients that its output sees."""
    sequence, encoder = case.build(variant, to_g=to_g), nn.Linear(WIDTH, WIDTH)
    context = encoder(data(2, requires_grad=False)).tanh()
    context.register_hook(arrivals.append)
    loss_of(case.run(sequence, data(), context, to_g)).backward()
    return gradients(sequence) | gradients(encoder)


def test_gradient_of_a_context(case: Case) -> None:
    """The encoder's backward runs once for each network that reads its output, and hooks see partial sums."""
    arrivals: dict[str, list[Tensor]] = {"plain": [], "ours": [], "published": []}
    found = {variant: with_context(case, variant, seen) for variant, seen in arrivals.items()}
    assert error(found["ours"], found["plain"]) < EXACT
    assert len(arrivals["plain"]) == len(arrivals["ours"]) == 1
    torch.testing.assert_close(arrivals["ours"], arrivals["plain"])
    assert len(arrivals["published"]) == (6 if case.name == "dual" else 3)


def test_context_for_g(case: Case) -> None:
    if not case.routes_to_g:
        pytest.skip("g never gets a keyword")
    assert_only_ours_runs(
        lambda variant: with_context(case, variant, [], to_g=True), RuntimeError, "backward through the graph a second"
    )


def test_backward_in_eval_mode(case: Case) -> None:
    assert_only_ours_runs(
        lambda variant: train(case, case.build(variant, networks(dropout=0.2)).eval()), TypeError, "ByteTensor"
    )


def test_eval_between_forward_and_backward(case: Case) -> None:
    def step(variant: str) -> dict[str, Tensor]:
        sequence = case.build(variant, networks(dropout=0.2))
        torch.manual_seed(5)
        loss = loss_of(case.run(sequence, data()))
        sequence.eval()
        loss.backward()
        assert not any(module.training for module in sequence.modules())
        return gradients(sequence)

    assert_only_ours_is_right(step, at_least=0.2)


def test_two_forwards_before_a_backward(case: Case) -> None:
    def step(variant: str) -> dict[str, Tensor]:
        sequence = case.build(variant, networks(dropout=0.2))
        torch.manual_seed(5)
        (loss_of(case.run(sequence, data(1))) + loss_of(case.run(sequence, data(2)))).backward()
        return gradients(sequence)

    assert_only_ours_is_right(step, at_least=0.2)


def test_batch_norm_counts_a_batch_once(case: Case) -> None:
    buffers = {}
    for variant in ("plain", "ours", "published"):
        sequence = case.build(variant, networks(norm=BatchNormLast))
        train(case, sequence)
        buffers[variant] = [b for m in networks_of(sequence) for b in m.buffers()]
    torch.testing.assert_close(buffers["ours"], buffers["plain"])
    assert {b.item() for b in buffers["ours"] if not b.dim()} == {1}
    assert {b.item() for b in buffers["published"] if not b.dim()} == {2}


def test_autocast_reaches_the_recomputation(case: Case) -> None:
    recomputed_in: dict[str, set[torch.dtype]] = {"plain": set(), "ours": set(), "published": set()}

    def step(variant: str) -> dict[str, Tensor]:
        sequence = case.build(variant)
        for module in sequence.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, out: recomputed_in[variant].add(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(case.run(sequence, data()).float())
        recomputed_in[variant].clear()
        loss.backward()
        return gradients(sequence)

    expected = step("plain")
    assert error(step("ours"), expected) < 1e-3
    assert error(step("published"), expected) > 2e-3
    assert recomputed_in == {"plain": set(), "ours": {torch.bfloat16}, "published": {torch.float32}}


def test_layer_dropout_below_the_threshold(case: Case) -> None:
    if case.name != "reformer":
        pytest.skip("only reformer has layer dropout and a threshold")
    assert_only_ours_runs(
        lambda variant: train(case, case.build(variant, layer_dropout=0.3, reverse_thres=100)),
        RuntimeError,
        "does not require grad",
    )


@pytest.mark.parametrize("what", ["weights", "context"])
def test_changed_in_place_before_the_backward(case: Case, what: str) -> None:
    def step(variant: str, change: bool = True) -> dict[str, Tensor]:
        sequence, context = case.build(variant), data(2)
        loss = loss_of(case.run(sequence, data(), context))
        with torch.no_grad():
            for tensor in (sequence.parameters() if what == "weights" else [context]) if change else []:
                tensor.mul_(1.5)
        loss.backward()
        return gradients(sequence)

    for variant in ("plain", "ours"):
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
            step(variant)
    assert error(step("published"), step("plain", change=False)) > 0.2


def test_output_changed_in_place_before_the_backward(case: Case) -> None:
    """Only reformer's class returns what its backward starts from; the others return a mean or a sum of it."""

    def step(variant: str, change: bool = True) -> dict[str, Tensor]:
        sequence, x = case.build(variant), data()
        out = sequence(torch.cat((x, x), dim=2)) if case.name == "reformer" else case.run(sequence, x)
        loss = out.clone().sin().sum()
        if change:
            with torch.no_grad():
                out.mul_(1.5)
        loss.backward()
        return gradients(sequence)

    expected = step("plain", change=False)
    assert (error(step("published"), expected) > 0.2) == (case.name == "reformer")
    assert error(step("ours"), expected) < EXACT


def test_functional_call(case: Case) -> None:
    """The recomputation uses the module's own weights: the given ones get no gradient."""

    class Called(nn.Module):
        def __init__(self, sequence: nn.Module) -> None:
            super().__init__()
            self.sequence = sequence

        def forward(self, x: Tensor) -> Tensor:
            return case.run(self.sequence, x)

    def step(variant: str) -> dict[str, Tensor]:
        called, x = Called(case.build(variant)), data()
        given = {name: (p.detach() * 1.3).requires_grad_() for name, p in called.named_parameters()}
        loss = loss_of(torch.func.functional_call(called, given, (x,), tie_weights=False))
        loss.backward()
        if variant != "published":
            assert not gradients(called)
        assert x.grad is not None
        return {"x": x.grad} | {name: p.grad for name, p in given.items() if p.grad is not None}

    expected, found = step("plain"), step("published")
    assert error(step("ours"), expected) < EXACT
    assert error({"x": found["x"]}, {"x": expected["x"]}) > 0.2
    assert found.keys() == {"x"}


def test_gradient_penalty(case: Case) -> None:
    """The second-order term is dropped."""

    def step(variant: str) -> dict[str, Tensor]:
        sequence, x = case.build(variant), data()
        out = case.run(sequence, x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        sequence.zero_grad()  # what the published classes have written
        (loss_of(out) + 1e-2 * slope.square().sum()).backward()
        return gradients(sequence)

    assert_only_ours_is_right(step, at_least=0.2)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return self.value.expand_as(x)


class InPlace(Net):
    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return super().forward(x.mul_(2.0))


class OutOfPlace(Net):
    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return super().forward(x * 2.0)


class Broadcasting(Net):
    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return super().forward(x).mean(dim=1, keepdim=True)


def with_f(kind: type[nn.Module]) -> Callable[[str], nn.Module]:
    return lambda role: kind() if role == "f" else Net()


def test_f_that_ignores_its_input(case: Case) -> None:
    assert_only_ours_runs(
        lambda variant: train(case, case.build(variant, with_f(Constant))), TypeError, "'Tensor' and 'NoneType'"
    )


def test_f_that_works_in_place_on_its_input(case: Case) -> None:
    """The published forward computes something else (reformer's edits the caller's tensor); ours refuses."""

    x = data(requires_grad=False)
    expected = case.run(case.build("plain", with_f(OutOfPlace)), x)
    sequence = case.build("published", with_f(InPlace))
    assert (case.run(sequence, x) - expected).norm() > 0.2 * expected.norm()
    if case.name == "reformer":
        doubled = torch.cat((x, x), dim=2)
        sequence(doubled)
        assert not torch.equal(doubled, torch.cat((x, x), dim=2))
    for x in (data(), data(requires_grad=False), data() * 1):
        with pytest.raises(RuntimeError, match=r"in.?place") as refusal:
            case.run(case.build("ours", with_f(InPlace)), x)
        assert "update 0 (target" in "".join([str(refusal.value), *getattr(refusal.value, "__notes__", [])])


def test_f_whose_output_broadcasts(case: Case) -> None:
    out = case.run(case.build("published", with_f(Broadcasting)), data())
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        loss_of(out).backward()
    with pytest.raises(ValueError, match=rf"update 0 .* shape \(2, 1, {WIDTH}\) .* \(2, {LENGTH}, {WIDTH}\)"):
        case.run(case.build("ours", with_f(Broadcasting)), data())


class Small(nn.Module):
    """A network that compiles fast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return self.linear(x.sin())


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # dynamo's own
def test_compiled_networks(case: Case) -> None:
    """With dynamic shapes a compiled backward donates its buffers; the published classes run f's with retain_graph."""

    def compiled(variant: str, role: str) -> nn.Module:
        network = Small()
        if variant != "plain" and role == "f":
            network.compile(backend="aot_eager", dynamic=True)
        return network

    def step(variant: str) -> dict[str, Tensor]:
        return train(case, case.build(variant, functools.partial(compiled, variant), depth=1))

    assert_only_ours_runs(step, RuntimeError, "donated buffers")
