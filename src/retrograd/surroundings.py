"""The global state that a program runs in, read at its forward and put back for each replay (R3, R5): autocast, the
attention backends that may be chosen, the default dtype, the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Surroundings:
    """What surrounds a program while it runs forward."""

    __slots__ = ("kinds", "autocast", "attention", "dtype", "generators")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = set(devices)
        kinds = {"cpu"} | {device.type for device in devices}
        self.kinds = sorted(kind for kind in kinds if torch.amp.is_autocast_available(kind))
        self.autocast = _autocast(self.kinds)
        self.attention, self.dtype = _attention(), torch.get_default_dtype()
        self.generators = default_generators(devices)

    def states(self) -> list[Any]:
        """Where the generators are."""
        return [state(generator) for generator in self.generators]

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in these surroundings, whatever surrounds this call; autocast's weight cache is off (R5)."""
        autocast, attention, cache = _autocast(self.kinds), _attention(), torch.is_autocast_cache_enabled()
        dtype = torch.get_default_dtype()
        try:
            torch.set_autocast_cache_enabled(False)
            if autocast != self.autocast:
                _set_autocast(self.autocast)
            if attention != self.attention:
                _set_attention(self.attention)
            if dtype != self.dtype:
                torch.set_default_dtype(self.dtype)
            return function()
        finally:
            torch.set_autocast_cache_enabled(cache)
            if autocast != self.autocast:
                _set_autocast(autocast)
            if attention != self.attention:
                _set_attention(attention)
            if dtype != self.dtype:
                torch.set_default_dtype(dtype)


def transformed() -> bool:
    """Inside a torch.func transform or under forward-mode AD. Torch has no public names for that."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd.forward_ad._current_level >= 0
    )


def _autocast(kinds: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _set_autocast(states: Iterable[tuple[str, bool, torch.dtype]]) -> None:
    # What torch.autocast does on entry, without its checks of the device: they cost as much as two kernels.
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _attention() -> tuple[bool, bool, bool, bool]:
    """Which backends scaled_dot_product_attention may use: each saves other tensors."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def _set_attention(allowed: tuple[bool, bool, bool, bool]) -> None:
    cuda = torch.backends.cuda
    setters = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
    for allow, enabled in zip(setters, allowed, strict=True):
        allow(enabled)


def default_generators(devices: Iterable[torch.device] = ()) -> list[torch.Generator]:
    """The default generators of the CPU and of every accelerator in play, the current one included."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        indices = {device.index for device in devices if device.type == "cuda"} | {torch.cuda.current_device()}
        found += [torch.cuda.default_generators[index] for index in sorted(i for i in indices if i is not None)]
    for kind in {device.type for device in devices} - {"cpu", "cuda", "meta"}:
        found += getattr(torch.get_device_module(kind), "default_generators", ())
    return found


def state(generator: torch.Generator) -> Any:
    """The state of a generator; on CUDA two integers on the host, so no synchronisation (R4)."""
    if generator.device.type == "cuda":
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError as error:  # while a graph is captured
            raise RuntimeError(
                f"{error}; to capture a reversible step in a CUDA graph, use retrograd.graphed"
            ) from None
    state = generator.get_state()
    return state.view(torch.int64) if state.numel() % 8 == 0 else state  # eight bytes at a time: faster to compare


def same(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, tuple):
        return a == b
    return torch.equal(a, b)


def digest(state: Any) -> int:
    """A state in eight bytes, to see whether it is the same again."""
    if isinstance(state, tuple):
        return hash(state)
    words = state.to(torch.int64)
    # Weighted: a plain sum would miss one counter going down as another goes up, which is what a draw does.
    return int((words * torch.arange(1, 2 * words.numel(), 2)).sum())


def restore(generator: torch.Generator, state: Any) -> None:
    """Put a generator back into a state; in that of another generator, which is all that works inside a CUDA graph."""
    if isinstance(state, torch.Generator):
        generator.graphsafe_set_state(state)
    elif isinstance(state, tuple):
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state.view(torch.uint8))


@contextmanager
def no_random_numbers(what: str, watched: Sequence[torch.Generator]) -> Iterator[None]:
    """Refuse what draws random numbers inside: they would be other numbers than those of the forward."""
    before = [state(generator) for generator in watched]
    yield
    if not all(same(state(generator), seen) for generator, seen in zip(watched, before, strict=True)):
        raise RuntimeError(
            f"{what}: an update draws random numbers (dropout?), which are not those of the forward; "
            "use eval mode in both directions"
        )
