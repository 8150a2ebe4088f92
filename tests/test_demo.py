"""`retrograd demo`: what it finds, what it says of that, and how it ends when it must."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import retrograd.demo
from retrograd import cli
from retrograd.demo import Settings, demo
from retrograd.screen import Screen

TINY = {"depth": 2, "width": 16, "length": 32, "batch": 2, "steps": 1}


@pytest.fixture(autouse=True)
def _short_sample(monkeypatch):
    monkeypatch.setattr(retrograd.demo, "SAMPLE", 40)


@pytest.fixture
def tiny(tmp_path):
    """Settings for a fraction of a second."""

    def settings(**options):
        return Settings(**TINY | {"seconds": 0.2, "plot": tmp_path / "memory.png"} | options)

    return settings


def call(*arguments: str) -> tuple[int, list[str]]:
    given = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    return cli.main(["demo", *given, "--seconds", "0.1", *arguments])


def test_it_compares_measures_trains_and_writes(tiny, capsys):
    found = demo(tiny(depth=8), Screen())
    kept, checkpointed, reverse = found.rows
    assert [row.way for row in found.rows] == ["kept", "checkpointed", "reversed"]
    assert kept.bytes > checkpointed.bytes > reverse.bytes
    assert kept.loss == checkpointed.loss == pytest.approx(reverse.loss, rel=1e-5)
    assert checkpointed.gradient_difference == 0
    assert 0 < reverse.gradient_difference < 1e-5
    assert found.agree
    assert sorted(found.depths) == [1, 2, 4, 8]
    assert {sizes["reversed"] for sizes in found.depths.values()} == {reverse.bytes}  # to the byte, at any depth
    assert found.depths[8]["kept"] > 2 * found.depths[1]["kept"]
    assert Path(found.plot).stat().st_size > 10_000
    assert found.losses
    assert "def __init__(self, " in found.sample
    out = capsys.readouterr().out
    for words in ("8 blocks", "checkpointed", "gradients agree", "from 1 to 8 blocks", "bits per byte", "A sample"):
        assert words in out
    assert "\x1b" not in out
    assert "\r" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_it_learns(tiny, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, perf_counter=itertools.count().__next__)
    monkeypatch.setattr(retrograd.demo, "time", clock)  # a second for each step
    found = demo(tiny(seconds=100), Screen(silent=True))
    assert len(found.losses) == 99
    assert retrograd.demo.smooth(found.losses[-20:]) < found.losses[0] - 1


@pytest.mark.parametrize("columns", ["40", "60"])
def test_a_narrow_terminal(tiny, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    demo(tiny(seconds=0), Screen())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "gradients off" in out


def test_a_terminal_shows_bars_with_rich_and_none_without(tiny, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    demo(tiny(seconds=0), Screen())
    assert "━" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    demo(tiny(seconds=0), Screen())
    assert "━" not in capsys.readouterr().out


def test_an_output_that_cannot_hold_every_character(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    Screen().say("a \N{REPLACEMENT CHARACTER}")
    assert narrow.buffer.getvalue() == b"a ?\n\n"


def test_for_machines(tmp_path, capsys):
    status = call("--json", "--plot", str(tmp_path / "memory.svg"))
    found = json.loads(capsys.readouterr().out)
    assert (status, found["agree"], found["stopped"]) == (0, True, False)
    assert found["settings"]["depth"] == 2
    assert [row["way"] for row in found["rows"]] == ["kept", "checkpointed", "reversed"]
    assert (tmp_path / "memory.svg").exists()


def test_a_file_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_bytes(b"to be or not to be " * 10)
    assert call("--data", "own.txt") == 0
    assert "reads own.txt" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--data", "empty.txt"], "empty.txt has no bytes"),
        (["--data", "short.txt"], "short.txt has 5 bytes; a sequence of --length 32 needs 33"),
        (["--data", "."], "directory"),
        (["--device", "toaster"], "toaster"),
        (["--device", "xpu:77"], "--device xpu:77 cannot be used here"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--depth", "0"], "--depth must be 1 or more, not 0"),
        (["--width", "-4"], "--width must be 1 or more, not -4"),
        (["--width", "7"], "even"),
        (["--steps", "0"], "--steps"),
        (["--batch", "many"], "--batch"),
        (["--seconds", "nan"], "--seconds"),
        (["--plot", "memory.txt"], ".png, .pdf or .svg"),
        (["--plot", "nowhere/memory.png"], "no directory nowhere"),
    ],
)
def test_a_bad_call_is_one_sentence_and_status_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("short")
    try:
        status = call(*arguments)
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("moment", "rows", "said"),
    [
        (("step", 0), 0, "Stopped."),
        (("step", 2), 2, "checkpointed"),
        (("peak", 4), 3, "agree"),
        (("step", 4), 3, "for one"),
    ],
)
def test_ctrl_c_ends_it_with_what_there_is(tmp_path, monkeypatch, capsys, moment, rows, said):
    """In the first way, in the third, while depths are measured, and in training (of which one step was done)."""
    name, number = moment
    original, calls = getattr(retrograd.demo, name), []

    def interrupted(*args):
        calls.append(name)
        if len(calls) > number:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(retrograd.demo, name, interrupted)
    monkeypatch.chdir(tmp_path)
    assert call("--seconds", "60") == 130
    out = capsys.readouterr().out
    assert said in out.replace("\n", " ")
    assert "Stopped." in out
    assert ("gradients off" in out) == bool(rows)
    monkeypatch.setattr(retrograd.demo, name, interrupted)
    calls.clear()
    assert call("--seconds", "60", "--json") == 130
    found = json.loads(capsys.readouterr().out)
    assert (len(found["rows"]), found["stopped"]) == (rows, True)


def test_what_does_not_fit_is_a_row(tiny, monkeypatch, capsys):
    original = retrograd.demo.peak

    def spent(model, tokens):
        if isinstance(model.blocks.policy, retrograd.Keep):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, tokens)

    monkeypatch.setattr(retrograd.demo, "peak", spent)
    found = demo(tiny(seconds=0), Screen())
    assert found["kept"].bytes is None
    assert found["reversed"].bytes > 0
    out = capsys.readouterr().out
    assert "do not fit" in out
    assert "reversed they do" in out
    assert found.status == 0


def test_when_nothing_fits_it_says_so_and_ends(tiny, monkeypatch, capsys):
    def spent(model, tokens):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(retrograd.demo, "peak", spent)
    found = demo(tiny(), Screen())
    assert found.status == 1
    assert "Not even the reversed model fits" in capsys.readouterr().out
    monkeypatch.setattr(retrograd.demo, "peak", lambda model, tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # anything else is no excuse
        demo(tiny(), Screen())


def test_gradients_that_differ_are_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retrograd.demo, "TOLERANCE", 0.0)
    assert call("--plot", str(tmp_path / "memory.png")) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_without_matplotlib_there_is_no_plot_and_all_else(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = demo(tiny(), Screen())
    assert found.plot is None
    assert found.sample is not None
    assert "pip install 'retrograd[cli]'" in capsys.readouterr().out
