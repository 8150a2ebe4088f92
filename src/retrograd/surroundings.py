"""The global state that a program runs in, read at its forward and put back for each replay (R3, R5): autocast, the
attention backends that may be chosen, the default dtype and device, the random generators.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_CPU = torch.device("cpu")

State = bytes | tuple[int, int]
"""The state of a random generator, to be compared and restored."""


class Surroundings:
    """What surrounds a program while it runs forward."""

    __slots__ = ("kinds", "modes", "generators", "_states", "_stood")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = set(devices)
        kinds = {"cpu"} | {device.type for device in devices}
        self.kinds = sorted(kind for kind in kinds if torch.amp.is_autocast_available(kind))
        self.modes = _modes(self.kinds)
        self.generators = default_generators(devices)
        self._states: list[State] = []
        self._stood: list[tuple[torch.Generator, State, None]] = []

    def states(self) -> list[State]:
        """Where the generators are."""
        return list(map(state, self.generators))

    def stood(self, states: list[State]) -> list[tuple[torch.Generator, State, None]]:
        """The generators, each at a state that it did not leave: the same list for the same states."""
        if not self._stood or not all(map(operator.is_, self._states, states)):
            self._states, self._stood = states, [*zip(self.generators, states, repeat(None))]
        return self._stood

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in these surroundings, whatever surrounds this call; autocast's weight cache is off (R5)."""
        here, cache = _modes(self.kinds), torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            if here != self.modes:
                _switch(here, self.modes)
                with self.modes[3] if here[3] != self.modes[3] else nullcontext():
                    return function()
            return function()
        finally:
            torch.set_autocast_cache_enabled(cache)
            if here != self.modes:
                _switch(self.modes, here)


def transformed() -> bool:
    """Inside a torch.func transform or under forward-mode AD. Torch has no public names for that."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd.forward_ad._current_level >= 0
    )


Modes = tuple[tuple[tuple[str, bool, torch.dtype], ...], tuple[bool, bool, bool, bool], torch.dtype, torch.device]
"""Autocast by kind of device; the backends that attention may choose from, since each saves other tensors; the default
dtype; the default device, which is a matter of each thread."""


def _modes(kinds: Sequence[str]) -> Modes:
    """How things are here."""
    cuda = torch.backends.cuda
    return (
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
        (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        torch.get_default_dtype(),
        # A default device is a mode on this stack, and slow to ask for. Torch has no public name for its height.
        torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU,  # pyright: ignore[reportAttributeAccessIssue]
    )


def _switch(here: Modes, there: Modes) -> None:
    """From one to the other, but for the default device, which has no setter that is undone for this thread alone."""
    if here[0] != there[0]:
        # What torch.autocast does on entry, without its checks of the device: they cost as much as two kernels.
        for kind, enabled, dtype in there[0]:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
    if here[1] != there[1]:
        cuda = torch.backends.cuda
        allow = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
        for set_allowed, allowed in zip(allow, there[1], strict=True):
            set_allowed(allowed)
    if here[2] != there[2]:
        torch.set_default_dtype(there[2])


def numerics() -> tuple[Any, ...]:
    """What decides by which kernels something is computed, and so about its last bits."""
    backends = torch.backends
    return (
        backends.cuda.matmul.fp32_precision,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cudnn.conv.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
        torch.are_deterministic_algorithms_enabled(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
    )


def default_generators(devices: Iterable[torch.device] = ()) -> list[torch.Generator]:
    """The default generators of the CPU and of every accelerator in play, the current one included."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        indices = {device.index for device in devices if device.type == "cuda"} | {torch.cuda.current_device()}
        found += [torch.cuda.default_generators[index] for index in sorted(i for i in indices if i is not None)]
    for kind in {device.type for device in devices} - {"cpu", "cuda", "meta"}:
        found += [torch.mps._get_default_mps_generator()] if kind == "mps" else _generators_of(kind)
    return found


def _generators_of(kind: str) -> Sequence[torch.Generator]:
    return getattr(torch.get_device_module(kind), "default_generators", ())


def state(generator: torch.Generator) -> State:
    """Where a generator is; on CUDA two integers on the host, so no synchronisation (R4)."""
    if generator.device.type == "cuda":
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError as error:  # while a graph is captured
            raise RuntimeError(
                f"{error}; to capture a reversible step in a CUDA graph, use retrograd.graphed"
            ) from None
    raw = generator.get_state()  # on the host for every device
    return ctypes.string_at(
        raw.data_ptr(), raw.nbytes
    )  # compared without operators of torch, which take ten times as long


def restore(generator: torch.Generator, state: State | torch.Generator) -> None:
    """Put a generator back into a state; in that of another generator, which is all that works inside a CUDA graph."""
    if isinstance(state, torch.Generator):
        generator.graphsafe_set_state(state)
    elif isinstance(state, tuple):
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@contextmanager
def no_random_numbers(what: str, watched: Sequence[torch.Generator]) -> Iterator[None]:
    """Refuse what draws random numbers inside: they would be other numbers than those of the forward."""
    before = [state(generator) for generator in watched]
    yield
    if [state(generator) for generator in watched] != before:
        raise RuntimeError(
            f"{what}: an update draws random numbers (dropout?), which are not those of the forward; "
            "use eval mode in both directions"
        )
