"""`graphed`: a whole training step in a CUDA graph.

Where tensors are small the host cannot launch kernels as fast as the device runs them, and a reversed step, which
launches a third more of them, waits for the host all the time. A graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .capture import Capture, Rehearsal, under_way
from .streams import Structure, flatten, unflatten
from .surroundings import state


def graphed(step: Callable[..., Any], *inputs: Any, warmup: int = 3) -> Graphed:
    """Capture a training step in a CUDA graph and return a function that launches it.

    `step(*inputs)` runs forward, loss and backward, the optimizer too if you like, and returns tensors or nothing. The
    function returned takes inputs of the same shapes and returns the same tensors each time, with new values: clone
    what you want to keep. Dropout draws new numbers at each launch, those that the step would draw without a graph.

    First the step runs `warmup` times on `inputs`, with all its effects, so give it inputs to train on. An optimizer
    needs `capturable=True`. Set gradients to None inside the step; afterwards leave `.grad` alone, since that is where
    the graph writes. Two backward passes over one forward that draws are refused.

    What the step does on the host is done once, at the capture. What is seen to depend on it is refused: a choice by
    the data, layer dropout, numbers of torch's generator for the CPU, `Offload`, `Reverse(watch=...)`. What is not seen
    is frozen: numbers of Python or NumPy, a learning rate (give the optimizer a tensor as `lr` and change that). A
    capture that fails also disables the steps that were captured before it.

    >>> import retrograd as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(2)])
    >>> def step(x):
    ...     net.zero_grad()
    ...     loss = net(x).square().mean()
    ...     loss.backward()
    ...     return loss.detach()
    >>> if torch.cuda.is_available():
    ...     net.cuda()
    ...     train = rg.graphed(step, torch.randn(4, 8, device="cuda"))
    ...     loss = train(torch.randn(4, 8, device="cuda"))
    """
    return Graphed(step, inputs, warmup)


class Graphed:
    """A captured step: call it with new inputs."""

    def __init__(self, step: Callable[..., Any], inputs: tuple[Any, ...], warmup: int) -> None:
        if not callable(step):
            raise TypeError(f"graphed: step must be a function that runs a training step, not {step!r}")
        if not isinstance(warmup, int) or warmup < 1:
            raise ValueError(
                f"graphed: warmup must be at least 1, not {warmup!r}: the step is rehearsed before capture"
            )
        if not torch.cuda.is_available():
            raise RuntimeError("graphed needs a CUDA device, and there is none here; call the step itself")
        leaves, self.structure = _flat(inputs)
        here = torch.device("cuda", torch.cuda.current_device())
        if any(leaf.device != here for leaf in leaves):
            raise ValueError(f"graphed: inputs must be on the current CUDA device, {here}: see torch.cuda.set_device")
        if any(leaf.requires_grad for leaf in leaves):
            raise ValueError(
                "graphed: an input needs a gradient, which would arrive at the graph's own copy of it; let the step "
                "hold that tensor instead of taking it as an input"
            )
        self.inputs = [leaf.detach().clone() for leaf in leaves]
        self.graph = torch.cuda.CUDAGraph()
        self.capture = Capture(self._rehearse(step, warmup), self.graph)
        self.outputs = self._record(step)

    def __call__(self, *inputs: Any) -> Any:
        """Launch the step on new inputs. Does not wait for the device."""
        leaves, structure = _flat(inputs)
        if structure != self.structure or [*map(_kind, leaves)] != [*map(_kind, self.inputs)]:
            raise ValueError(
                f"graphed: captured for inputs of {_shown(self.inputs)}, called with {_shown(leaves)}; a graph holds "
                "for one set of shapes, types and devices: capture another one, or pad"
            )
        self._check(wait=False)
        with torch.no_grad():
            for static, leaf in zip(self.inputs, leaves, strict=True):
                static.copy_(leaf)
        generator = self.capture.rehearsal.generator
        start = generator.get_offset()
        self.capture.place()
        self.graph.replay()
        if generator.get_offset() - start != self.capture.rehearsal.total:
            raise RuntimeError(
                "graphed: the captured step draws other random numbers than the one before the capture, so replays "
                "have drawn wrong ones; what a step draws must not depend on how often it has run"
            )
        self._send()
        return self.outputs

    def synchronize(self) -> None:
        """Wait for the device, and raise what it has found: a stream that left the range of `ExactAdd`."""
        torch.cuda.synchronize()
        self._check(wait=True)

    def _rehearse(self, step: Callable[..., Any], warmup: int) -> Rehearsal:
        """Run the step aside, as torch asks before a capture; the last time, note what is drawn."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        with torch.cuda.stream(aside):
            for _ in range(warmup - 1):
                step(*unflatten(self.inputs, self.structure))
            rehearsal, on_host = Rehearsal(generator), state(torch.default_generator)
            with under_way(rehearsal):
                step(*unflatten(self.inputs, self.structure))
            rehearsal.end()
        torch.cuda.current_stream().wait_stream(aside)
        if state(torch.default_generator) != on_host:
            raise RuntimeError(
                "graphed: the step draws random numbers on the CPU (layer dropout, a mask made there); in a graph they "
                "would be the same at every step. Draw them on the CUDA device, or outside and pass them as an input"
            )
        return rehearsal

    def _record(self, step: Callable[..., Any]) -> Any:
        """Capture the step."""
        generator = self.capture.rehearsal.generator
        spare = generator.clone_state()
        try:
            with under_way(self.capture), torch.cuda.graph(self.graph):
                outputs = step(*unflatten(self.inputs, self.structure))
        except BaseException as error:
            generator.graphsafe_set_state(spare)  # a capture that fails leaves the other one unable to draw
            if not isinstance(error, Exception):
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(
                f"graphed: the step cannot be captured: {reason[0]} (a graph cannot hold what waits for the device or "
                "decides by its values: .item(), print, a copy to the CPU, an optimizer without capturable=True)"
            ) from error
        if self.capture.calls != len(self.capture.rehearsal.offsets):
            raise RuntimeError(
                f"graphed: the step ran {self.capture.calls} updates in its capture and "
                f"{len(self.capture.rehearsal.offsets)} before; it must do the same at each call (Auto learns in its "
                "first step: then warmup must be 2 or more)"
            )
        return outputs

    def _send(self) -> None:
        """Queue what exact joins have found for the host."""
        for alarms in self.capture.alarms:
            alarms.send()

    def _check(self, *, wait: bool) -> None:
        for alarms in self.capture.alarms:
            alarms.check(wait=wait)


def _flat(inputs: tuple[Any, ...]) -> tuple[list[Tensor], Structure]:
    try:
        return flatten(inputs)
    except TypeError as error:
        raise TypeError(f"graphed: inputs are tensors or trees of tensors: {error}") from None


def _kind(leaf: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return leaf.shape, leaf.dtype, leaf.device


def _shown(leaves: list[Tensor]) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}" for leaf in leaves) or "no tensors"
