"""`check`: does a module that holds reversible programs train as it would with kept activations, and if not, why?

One training step with kept activations is compared with one under the module's own policies, then each update of each
program is run by itself (examine.py).
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .auto import Auto
from .examine import Examination, Program, copied, relative_error
from .policies import Keep, Policy, Reverse
from .reach import reach
from .report import Drift, GradientError, Problem, Report
from .reversible import Reversible
from .streams import Stream, leaves_of
from .surroundings import default_generators, restore, state
from .tape import _current_pass
from .update import Update

# Where a kept step may be refused.
ENGINE = {"engine", "update", "joins", "alarms", "rounding"}

ON_ROUNDING = "join=ExactAdd(), or policy=Reverse(anchor_every=16); for Momentum, also a gamma nearer to 1"
ON_NARROW_STREAMS = "streams in float32: x.float() before the module, while autocast may stay; then " + ON_ROUNDING
ON_BUFFERS = "hold the module in fn itself (an attribute or a closure), so that its buffers can be seen; or Keep()"


def check(module: nn.Module, *inputs: Any, tolerance: float | None = None, **kwargs: Any) -> Report:
    """Compare a training step of `module` with kept activations, and say what is wrong with its updates.

    `module` is a `Reversible` or holds some. A gradient is a problem when its relative error against kept activations
    is above `tolerance`: 1e-3, or 1e-6 where all streams are float64. Weights, gradients, buffers, random state, flags
    and inputs are afterwards what they were. All activations are kept meanwhile: give it a small batch, and the module
    before DDP or FSDP wrap it. `Auto` is checked as if it reversed everything.

    >>> import retrograd as rg
    >>> net = rg.ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
    >>> check(net, torch.randn(2, 8)).raise_for_problems()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"check takes a module and its inputs, not a {type(module).__name__}")
    reversibles = {name: each for name, each in module.named_modules() if isinstance(each, Reversible)}
    if not reversibles:
        raise ValueError(f"check: there is no Reversible in {type(module).__name__}, so there is nothing to check")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"check: tolerance must be a positive relative error, not {tolerance!r}")
    before = _State(module, inputs, kwargs)
    try:
        with torch.enable_grad():
            return _check(module, reversibles, before, inputs, kwargs, tolerance)
    finally:
        before.rewind()
        before.give_back_gradients()


def _check(
    module: nn.Module,
    reversibles: dict[str, Reversible],
    before: _State,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    tolerance: float | None,
) -> Report:
    programs: list[Program] = []
    kept, own = _TrainingStep(module), _TrainingStep(module)
    failure: Exception | None = None
    try:
        with _observed(reversibles, programs, keep=True):
            kept.run(inputs, kwargs)
        before.rewind()
        try:
            with _observed(reversibles, None, keep=False):
                own.run(inputs, kwargs)
        except Exception as error:  # with kept activations it works, so reversing is to blame
            failure = error
    except Exception as error:
        if not _raised_by_the_engine(error):
            raise
        failure = error
    before.rewind()
    if not programs and failure is None:
        raise ValueError(
            f"check: no Reversible in {type(module).__name__} ran with grad enabled and through its own run() or "
            "forward(), so there is nothing to check"
        )

    leaves = [leaf for each in programs for leaf in leaves_of(each.streams, Tensor)]
    bits = [torch.finfo(leaf.dtype).bits for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    if tolerance is None:
        tolerance = 1e-6 if all(number == 64 for number in bits) else 1e-3  # of complex128 it is 64 as well
    drift: list[Drift] = []
    problems: list[Problem] = []
    for number, each in enumerate(programs):
        prefix = f"{each.name or type(module).__name__}, call {number}: " if len(programs) > 1 else ""
        examination = Examination(each, prefix, tolerance)
        try:
            examination.run()
        except Exception:
            if failure is None and not examination.problems:  # else it is known why it could not go on
                raise
        drift += examination.drift
        problems += examination.problems
        before.rewind()
    gradients: list[GradientError] = []
    if failure is None:
        gradients = _compared(own.gradients, kept.gradients)
        narrow = any(number < 32 for number in bits)
        problems += _wrong_buffers(own, kept, tolerance)
        remedy = ON_NARROW_STREAMS if narrow else ON_ROUNDING
        problems += _wrong_gradients(gradients, tolerance, "see problem 1" if problems else remedy)
    elif not any(_is_about(failure, problem) for problem in problems):
        problems.append(Problem("error", _where(failure), str(failure), "see what the message says"))
    return Report(gradients, drift, problems, tolerance)


def _is_about(failure: Exception, problem: Problem) -> bool:
    """Whether an error names the update of a problem that is known already."""
    return problem.kind != "discrete choice" and problem.where.endswith(_where(failure))


def _where(failure: Exception) -> str:
    """The update that an error names, or else what kind of error it is."""
    text = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
    named = re.search(r"update \d+ \(target [^)]*\)", text)
    return named[0] if named else type(failure).__name__


# ---- one training step, and leaving no trace of it


class _State:
    """What a training step may change of a module, and putting it back."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.modules = [(m, m.training, m._parameters.copy(), m._buffers.copy()) for m in module.modules()]
        tensors = [*module.parameters(), *module.buffers()]
        if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
            raise ValueError("check: the module has lazy parameters; run it once before")
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        devices = {tensor.device for tensor in [*tensors, *leaves_of([inputs, kwargs], Tensor)]}
        generators = default_generators(devices) + reach(module, kwargs).generators
        self.random = [(generator, state(generator)) for generator in generators]
        for parameter, _ in self.gradients:
            parameter.grad = None

    def rewind(self) -> None:
        """Weights, buffers, training flags and random state as they were."""
        for module, training, parameters, buffers in self.modules:
            module.training = training
            _put_back(module._parameters, parameters)
            _put_back(module._buffers, buffers)
        with torch.no_grad():
            for tensor, copy in self.tensors:
                if not torch.equal(tensor, copy):  # not by version: batch norm moves its statistics without a trace
                    tensor.copy_(copy)
        for generator, then in self.random:
            restore(generator, then)

    def give_back_gradients(self) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


def _put_back(where: dict[str, Any], then: dict[str, Any]) -> None:
    if where.keys() != then.keys() or any(where[name] is not value for name, value in then.items()):
        where.clear()
        where.update(then)


class _TrainingStep:
    """A forward and a backward on copies of the inputs: the gradients, and the buffers after each of the two."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients: dict[str, Tensor | None] = {}
        self.after_forward: dict[str, Tensor] = {}
        self.after_backward: dict[str, Tensor] = {}

    def run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, kwargs = copied((inputs, kwargs), keep=set(map(id, self.module.parameters())))
        wanted: dict[str, Tensor] = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        for where, value in (*enumerate(inputs), *kwargs.items()):
            leaves = [leaf for leaf in leaves_of(value, Tensor) if leaf.requires_grad]
            names = [f"input {where}"] if len(leaves) == 1 else [f"input {where}[{i}]" for i in range(len(leaves))]
            wanted.update(zip(names, leaves, strict=True))
        out = self.module(*inputs, **kwargs)
        outputs = [leaf for leaf in leaves_of([out], Tensor) if leaf.requires_grad]
        if not outputs or not wanted:
            raise ValueError(
                "check: nothing in the output requires grad, so there is no gradient to check; let a weight or an "
                "input require it, and return a tensor or a tree of tensors"
            )
        self.after_forward = self._buffers()
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf) if leaf.dim() else None
            for leaf in outputs
        ]
        found = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
        self.gradients = dict(zip(wanted, found, strict=True))
        self.after_backward = self._buffers()

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}


def _raised_by_the_engine(error: Exception) -> bool:
    """Whether it was raised in the files of the engine, not in a user's function or in torch."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    path = Path(frame.tb_frame.f_code.co_filename) if frame is not None else Path()
    return path.parent == Path(__file__).parent and path.stem in ENGINE


# ---- what the programs of a step were


@contextlib.contextmanager
def _observed(reversibles: dict[str, Reversible], programs: list[Program] | None, *, keep: bool) -> Iterator[None]:
    """Note the programs that run, if they are wanted; `keep`: run them with kept activations."""
    replaced: list[tuple[Reversible, str, Any]] = []
    try:
        for name, module in reversibles.items():
            for attribute, observer in _observers(name, module, programs, keep=keep).items():
                replaced.append((module, attribute, module.__dict__.get(attribute)))
                module.__dict__[attribute] = observer
        yield
    finally:
        for module, attribute, own in replaced:
            if own is None:
                del module.__dict__[attribute]
            else:
                module.__dict__[attribute] = own


def _observers(
    name: str, module: Reversible, programs: list[Program] | None, *, keep: bool
) -> dict[str, Callable[..., Any]]:
    """`updates`, `policy_for` and `invert` of one module, observed. A run asks for its updates, then for its policy."""
    updates, policy_for, invert = module.updates, module.policy_for, module.invert
    described: list[list[Update]] = []

    def observed_updates(**kwargs: Any) -> list[Update]:
        described[:] = [[replace(update, policy=_examinable(update.policy)) for update in updates(**kwargs)]]
        return [replace(update, policy=Keep()) for update in described[0]] if keep else described[0]

    def observed_policy(streams: Mapping[str, Stream]) -> Policy:
        policy = _examinable(policy_for(streams)) or Reverse()
        listed = described.pop() if described else None
        in_the_forward = torch.is_grad_enabled() and _current_pass() == -1  # a checkpoint around it would run it again
        if listed is not None and programs is not None and in_the_forward:
            programs.append(Program(name, listed, streams, policy))
        return policy

    def observed_invert(streams: Mapping[str, Stream], **kwargs: Any) -> dict[str, Stream]:
        noted = len(programs or ())
        out = invert(streams, **kwargs)
        if programs is not None:
            del programs[noted:]  # the way back is no program of its own
        return out

    return {"updates": observed_updates, "policy_for": observed_policy, "invert": observed_invert}


def _examinable(policy: Policy | None) -> Policy | None:
    """The policy without what would learn from this step or warn about it: the drift is measured here."""
    if isinstance(policy, Reverse):
        return replace(policy, watch=None)
    return Reverse() if isinstance(policy, Auto) else policy


# ---- comparing


def _compared(found: dict[str, Tensor | None], kept: dict[str, Tensor | None]) -> list[GradientError]:
    """The relative errors of gradients, worst first.

    A gradient that is zero but for rounding (a bias before a softmax) has no relative error of its own: below a tenth
    of the typical gradient, the error is relative to that tenth.
    """
    norms = {name: _norm(gradient) for name, gradient in kept.items()}
    sizes = {name: math.sqrt(max(1, gradient.numel())) for name, gradient in kept.items() if gradient is not None}
    typical = statistics.median([norms[name] / size for name, size in sizes.items() if norms[name]] or [0.0])
    rows = []
    for name, gradient in kept.items():
        mine = found[name]
        if gradient is None and mine is None:
            continue
        if gradient is None or mine is None:
            rows.append(GradientError(name, 0.0 if _norm(gradient) == _norm(mine) else math.inf, norms[name]))
            continue
        finite = torch.isfinite(gradient)
        difference = _norm(torch.where(finite, mine - gradient, 0))
        scale = max(_norm(torch.where(finite, gradient, 0)), typical * sizes[name] / 10)
        same = torch.equal(torch.isfinite(mine), finite)
        error = math.inf if not same or (difference and not scale) else difference / scale if difference else 0.0
        rows.append(GradientError(name, error, norms[name]))
    return sorted(rows, key=lambda row: -row.error)


def _norm(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)))


def _wrong_gradients(rows: list[GradientError], tolerance: float, remedy: str) -> list[Problem]:
    """One problem for all: they are wrong together, and for one reason."""
    wrong = [row for row in rows if not row.error <= tolerance]
    if not wrong:
        return []
    seen = f"a relative error of {rows[0].error:.1e}; above {tolerance:g} in {len(wrong)} of {len(rows)} gradients"
    return [Problem("gradient", rows[0].name, seen, remedy)]


def _wrong_buffers(own: _TrainingStep, kept: _TrainingStep, tolerance: float) -> list[Problem]:
    """Buffers that the backward changed, or that are not as with kept activations after it."""
    problems = []
    for name, buffer in own.after_backward.items():
        expected = kept.after_backward[name]
        error, moved = relative_error(buffer, expected), relative_error(buffer, own.after_forward[name])
        if moved and not relative_error(expected, kept.after_forward[name]):
            problems.append(Problem("buffer", name, "a replay changed it in the backward", ON_BUFFERS))
        elif error > tolerance:
            seen = f"after a step it is {error:.1e} off what it is with kept activations"
            problems.append(Problem("buffer", name, seen, ON_BUFFERS))
    return problems
