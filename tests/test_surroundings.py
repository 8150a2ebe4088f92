"""Autocast, attention backends and generators: read, put back, restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import retrograd as rg
from retrograd.surroundings import (
    Surroundings,
    default_generators,
    no_random_numbers,
    restore,
    state,
)

CPU = torch.device("cpu")


def autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def fail() -> None:
    raise ArithmeticError("as told")


@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_is_off_inside_and_as_before_after(cache: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        surroundings = Surroundings([CPU])
        assert surroundings.run(autocast) == (True, torch.bfloat16, False)
        assert autocast() == (True, torch.bfloat16, cache)


def test_run_returns_what_the_function_returns() -> None:
    value = object()
    assert Surroundings([]).run(lambda: value) is value


def test_autocast_of_then_is_put_back_around_the_call() -> None:
    with torch.autocast("cpu", torch.float16):
        then = Surroundings([CPU])
    outside = autocast()
    assert then.run(autocast) == (True, torch.float16, False)
    assert autocast() == outside
    none = Surroundings([CPU])
    with torch.autocast("cpu", torch.bfloat16):
        assert none.run(autocast)[0] is False
        assert autocast() == (True, torch.bfloat16, True)


def test_everything_is_restored_after_an_exception() -> None:
    with torch.autocast("cpu", torch.float16), sdpa_kernel(SDPBackend.MATH):
        then = Surroundings([CPU])
    with torch.autocast("cpu", torch.bfloat16):
        before = autocast(), torch.backends.cuda.flash_sdp_enabled()
        with pytest.raises(ArithmeticError, match="as told"):
            then.run(fail)
        assert (autocast(), torch.backends.cuda.flash_sdp_enabled()) == before


def test_surroundings_inside_surroundings() -> None:
    with torch.autocast("cpu", torch.float16):
        inner = Surroundings([CPU])
    outer = Surroundings([CPU])

    def nested() -> list[Any]:
        return [autocast(), inner.run(autocast), autocast()]

    plain = (*autocast()[:2], False)
    assert outer.run(nested) == [plain, (True, torch.float16, False), plain]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_attention_backends_of_then(backend: SDPBackend) -> None:
    cuda = torch.backends.cuda

    def allowed() -> tuple[bool, ...]:
        return (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )

    outside = allowed()
    with sdpa_kernel(backend):
        then, expected = Surroundings([CPU]), allowed()
    assert expected != outside
    assert then.run(allowed) == expected
    assert allowed() == outside


def test_devices_without_autocast_are_passed_over() -> None:
    assert Surroundings([torch.device("meta"), CPU]).kinds == ["cpu"]


def test_the_cpu_generator_is_always_among_them() -> None:
    found = default_generators([CPU, torch.device("meta")])
    assert found[0] is torch.default_generator


# Generators

DRAWS: dict[str, Callable[[torch.Generator], Any]] = {
    "one uniform": lambda g: torch.rand(1, generator=g),
    "one normal": lambda g: torch.randn(1, generator=g),
    "one half": lambda g: torch.rand(1, generator=g, dtype=torch.float64),
    "many normal": lambda g: torch.randn(1000, generator=g),
    "a permutation": lambda g: torch.randperm(7, generator=g),
    "coins": lambda g: torch.ones(3).bernoulli_(0.5, generator=g),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("own", [True, False], ids=["a user's", "the default"])
def test_a_draw_is_seen_and_can_be_repeated(draw: Callable[[torch.Generator], Any], own: bool) -> None:
    generator = torch.Generator().manual_seed(3) if own else torch.default_generator
    before = state(generator)
    assert before == state(generator)
    first = draw(generator)
    after = state(generator)
    assert before != after
    assert hash(before) != hash(after)
    restore(generator, before)
    assert state(generator) == before
    assert torch.equal(draw(generator), first)
    assert hash(state(generator)) == hash(after)


def test_restoring_a_users_generator_leaves_the_default_one() -> None:
    generator, default = torch.Generator(), state(torch.default_generator)
    then = state(generator)
    torch.rand(3, generator=generator)
    restore(generator, then)
    assert state(torch.default_generator) == default


def test_digests_of_a_thousand_states_differ() -> None:
    generator = torch.Generator()
    seen = {hash(state(generator))}
    for _ in range(1000):
        torch.rand(1, generator=generator)
        seen.add(hash(state(generator)))
    assert len(seen) == 1001


def test_a_state_is_a_copy() -> None:
    generator = torch.Generator()
    then = state(generator)
    torch.rand(5, generator=generator)
    assert then != state(generator)


def test_states_on_cuda_are_two_integers() -> None:
    """Without a device: `restore` goes back to a seed and an offset, and seeds only where the seed differs."""

    class OnCuda:
        device = torch.device("cuda")

        def __init__(self) -> None:
            self.seed, self.offset, self.seeded = 5, 8, 0

        def initial_seed(self) -> int:
            return self.seed

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

        def manual_seed(self, seed: int) -> None:
            self.seed, self.offset, self.seeded = seed, 0, self.seeded + 1

    generator: Any = OnCuda()
    then = state(generator)
    generator.offset = 12
    assert then != state(generator)
    assert hash(then) != hash(state(generator))
    restore(generator, then)
    assert (generator.seed, generator.offset, generator.seeded) == (5, 8, 0)
    generator.manual_seed(6)
    restore(generator, then)
    assert (generator.seed, generator.offset, generator.seeded) == (5, 8, 2)
    assert then == state(generator)


def test_random_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"this: an update draws random numbers \(dropout\?\).*use eval mode"):
        with no_random_numbers("this", [torch.default_generator]):
            torch.rand(1)


def test_what_draws_nothing_is_not_refused() -> None:
    with no_random_numbers("this", [torch.default_generator]):
        torch.ones(1).sin()


def test_an_exception_inside_is_not_hidden_by_the_random_numbers() -> None:
    def draw_and_fail() -> None:
        with no_random_numbers("this", []):
            torch.rand(1)
            fail()

    with pytest.raises(ArithmeticError, match="as told"):
        draw_and_fail()


def test_the_default_device_is_that_of_the_forward() -> None:
    def fn(b: torch.Tensor) -> torch.Tensor:
        return (b * torch.ones(8)).sin()

    with torch.device("meta"):
        given = {name: torch.randn(8, requires_grad=True) for name in "ab"}
        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], given)
    out["b"].sum().backward()
    assert given["a"].grad is not None
    assert given["a"].grad.is_meta
    given = {name: torch.randn(8, requires_grad=True) for name in "ab"}
    out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], given)
    with torch.device("meta"):
        out["b"].sum().backward()
        assert torch.ones(1).is_meta
    assert given["a"].grad is not None


# What torch might change


def test_autocast_is_what_its_setters_set() -> None:
    """`torch.autocast` on entry and exit, by its parts: these must be all there is to it."""
    x, w = torch.randn(2, 2), torch.randn(2, 2)
    before = autocast()
    try:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(False)
        assert autocast() == (True, torch.bfloat16, False)
        assert (x @ w).dtype == torch.bfloat16
        torch.set_autocast_dtype("cpu", torch.float16)
        assert (x @ w).dtype == torch.float16
        torch.set_autocast_enabled("cpu", False)
        assert (x @ w).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        torch.set_autocast_cache_enabled(before[2])
    assert autocast() == before


def test_a_default_device_is_a_mode_on_the_stack() -> None:
    height = torch._C._len_torch_function_stack()
    with torch.device("meta"):
        assert torch._C._len_torch_function_stack() == height + 1
    assert torch._C._len_torch_function_stack() == height


def test_metal_has_a_generator() -> None:
    assert callable(torch.mps._get_default_mps_generator)
