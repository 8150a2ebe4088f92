"""Which keywords go to which network, by signature: also through whatever a network may be wrapped in."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from retrograd.keywords import accepted, refuse_unrouted
from retrograd.sequences import Residual

GIVEN = {"mask": 1, "context": 2}


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x


class Open(nn.Module):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x


class Closed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Strict(nn.Module):
    def forward(self, x: Tensor, /, *rest: Any, context: Any) -> Tensor:
        return x


class PositionalOnly(nn.Module):
    def forward(self, x: Tensor, mask: Any = None, /) -> Tensor:
        return x


class Inherits(Masked):
    pass


class Wrapper(nn.Module):
    """As DistributedDataParallel: what it wraps is its `module`, and it passes on what it gets."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class Decided(Wrapper):
    """Has a `module`, but a signature of its own."""

    def forward(self, x: Tensor, context: Any = None) -> Any:
        return self.module(x)


def test_nothing_given_asks_nobody() -> None:
    assert accepted(None, {}) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (Masked(), ["mask"]),
        (Inherits(), ["mask"]),
        (Open(), ["mask", "context"]),
        (Closed(), []),
        (Strict(), ["context"]),
        (PositionalOnly(), []),
        (lambda x, context: x, ["context"]),
        (functools.partial(lambda x, mask, context: x, mask=0), ["mask", "context"]),
        (Masked().forward, ["mask"]),
        (nn.Sequential(Masked()), []),
    ],
    ids=[
        "by name",
        "inherited",
        "any",
        "none",
        "keyword only",
        "positional only",
        "function",
        "partial",
        "method",
        "Sequential",
    ],
)
def test_keywords_by_signature(fn: Any, names: list[str]) -> None:
    assert accepted(fn, GIVEN) == {name: GIVEN[name] for name in names}


@pytest.mark.parametrize("wrap", [Wrapper, AveragedModel, Residual, lambda m: Wrapper(Wrapper(m))])
@pytest.mark.parametrize(("fn", "names"), [(Masked, ["mask"]), (Closed, []), (Open, ["mask", "context"])])
def test_wrappers_are_looked_through(wrap: Any, fn: Any, names: list[str]) -> None:
    assert list(accepted(wrap(fn()), GIVEN)) == names


def test_a_wrapper_with_a_signature_of_its_own_decides() -> None:
    assert accepted(Decided(Masked()), GIVEN) == {"context": 2}


def test_a_wrapper_of_no_module_takes_anything() -> None:
    assert accepted(Wrapper(None), GIVEN) == GIVEN


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when Dynamo is imported
@pytest.mark.parametrize("around", [lambda m: m, Wrapper], ids=["compiled", "wrapped and compiled"])
def test_compiled_modules_are_looked_through(around: Any) -> None:
    assert accepted(torch.compile(around(Masked()), backend="eager"), GIVEN) == {"mask": 1}
    assert accepted(Wrapper(torch.compile(Closed(), backend="eager")), GIVEN) == {}


def test_a_forward_patched_on_the_instance() -> None:
    patched, other = Masked(), Masked()
    patched.forward = lambda x, context: x  # type: ignore[method-assign]
    assert accepted(patched, GIVEN) == {"context": 2}
    assert accepted(other, GIVEN) == {"mask": 1}


def test_a_forward_patched_with_the_signature_of_another() -> None:
    patched = Masked()

    @functools.wraps(patched.forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return Masked.forward(patched, *args, **kwargs)

    patched.forward = timed  # type: ignore[method-assign]
    assert accepted(patched, GIVEN) == {"mask": 1}


def test_a_forward_without_a_signature() -> None:
    patched = Closed()
    patched.forward = torch.sin  # type: ignore[method-assign, assignment]
    assert accepted(patched, GIVEN) == {}


def test_the_stream_is_no_keyword() -> None:
    assert accepted(Closed(), {"x": 1}) == {}


def test_what_is_accepted_is_a_new_dict() -> None:
    given = dict(GIVEN)
    accepted(Open(), given)["mask"] = None
    assert given == GIVEN


def test_a_keyword_that_nobody_takes() -> None:
    with pytest.raises(TypeError, match=r"Closed: no network takes the keyword 'context'; .*route=\{\.\.\.\}"):
        refuse_unrouted(GIVEN, {"mask"}, Closed())
    refuse_unrouted(GIVEN, {"mask", "context"}, Closed())
