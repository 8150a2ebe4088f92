"""`retrograd.dropin.install`: puts our classes where the models of the packages look theirs up, and takes them away."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import published
import pytest
from cases import OURS
from published import HOMES, MODELS

import retrograd as rg
from retrograd import dropin

PACKAGES = ["axial_attention", "nuwa_pytorch", "reformer_pytorch", "se3_transformer_pytorch"]


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    yield
    try:
        assert in_place() == published.CLASSES
    finally:
        dropin.uninstall()


def in_place() -> dict[str, type]:
    return {name: getattr(home, attribute) for name, (home, attribute) in HOMES.items()}


def test_inside_a_block() -> None:
    with dropin.install() as installed:
        assert in_place() == OURS
        model = MODELS["ReformerLM"](0.0)
        assert sorted(installed.packages) == PACKAGES
        assert "axial_attention" in repr(installed)
    assert in_place() == published.CLASSES
    assert isinstance(model.module.reformer.layers, dropin.reformer.ReversibleSequence)  # a model keeps its classes
    model.step()[1].backward()


def test_the_plain_sequence_of_se3_too() -> None:
    home = HOMES["se3"][0]
    original = home.SequentialSequence
    with dropin.install():
        assert home.SequentialSequence is dropin.se3.SequentialSequence
    assert home.SequentialSequence is original


def test_after_an_error_in_the_block() -> None:
    with pytest.raises(ZeroDivisionError), dropin.install():
        1 / 0  # noqa: B018
    assert in_place() == published.CLASSES


def test_for_good_and_back() -> None:
    dropin.install()
    assert in_place() == OURS
    dropin.uninstall()
    assert in_place() == published.CLASSES
    dropin.uninstall()
    assert in_place() == published.CLASSES


def test_twice() -> None:
    """The second time must not take our classes for the published ones."""
    assert dropin.install().packages == dropin.install().packages
    assert in_place() == OURS
    dropin.uninstall()
    assert in_place() == published.CLASSES


def test_a_block_inside_of_what_is_installed() -> None:
    """A block undoes what it has done, and here it has done nothing."""
    dropin.install()
    with dropin.install():
        assert in_place() == OURS
    assert in_place() == OURS
    dropin.uninstall()


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nuwa_pytorch.nuwa_pytorch", None)  # import raises ModuleNotFoundError
    with dropin.install() as installed:
        assert sorted(installed.packages) == [name for name in PACKAGES if name != "nuwa_pytorch"]
        assert in_place() == {name: (published.CLASSES if name in ("nuwa", "dual") else OURS)[name] for name in OURS}


def test_none_of_the_packages_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for home, _ in HOMES.values():
        monkeypatch.setitem(sys.modules, home.__name__, None)
    with dropin.install() as installed:
        assert installed.packages == []


def test_ours_are_reversible() -> None:
    assert all(issubclass(ours, rg.Reversible) for ours in OURS.values())
