"""The command `retrograd`: what it prints, and what it tells the shell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from retrograd import __version__, bench, cli

MODELS = """
import torch
from torch import nn
import retrograd as rg

def make():
    return rg.ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(4, 8), make()
    def forward(self, tokens, mask=None):
        y = self.net(self.embed(tokens))
        return y if mask is None else y * mask[..., None]

class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls

def wrong():
    return rg.ReversibleSequence([(Noise(), nn.Linear(8, 8))])

class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) * (float("inf") if rg.phase() and rg.phase().replaying else 1.0)

def grows():
    return rg.ReversibleSequence([(Grows(), nn.Linear(8, 8)) for _ in range(2)])

def fails():
    raise OSError("no weights\\nhere")

def number():
    return 3

def plain():
    return nn.Linear(8, 8)

instance = make()
"""


@pytest.fixture(autouse=True)
def _models(tmp_path, monkeypatch):
    (tmp_path / "models_of_the_cli_tests.py").write_text(MODELS)
    (tmp_path / "broken_of_the_cli_tests.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command; "@make" is the factory of that name."""
    arguments = tuple(a.replace("@", "models_of_the_cli_tests:") for a in arguments)
    try:
        status = cli.main(arguments)
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    return status, out, err


def test_measure(capsys):
    status, out, err = call(capsys, "measure", "@make", "--input", "2,8")
    assert (status, err) == (0, "")
    assert "6 replays" in out
    assert "saved tensors" in out


def test_measure_for_machines(capsys):
    status, out, _ = call(capsys, "measure", "@make", "--input", "2,8", "--json", "--policy", "keep")
    found = json.loads(out)
    assert (status, found["replays"], found["weights"]) == (0, 0, 6 * 72 * 4)
    assert len(found["updates"]) == 6
    assert found["peak"] == sum(found[kind] for kind in ("weights", "gradients", "streams", "saved", "rest"))


def test_measure_with_integers_a_keyword_and_autocast(capsys):
    inputs = ("--input", "2,5:int64", "--input", "mask=2,5:bool", "--autocast", "bf16")
    status, out, _ = call(capsys, "measure", "@Tokens", *inputs)
    assert (status, "6 replays" in out) == (0, True)


@pytest.mark.parametrize(("policy", "replays"), [("reverse", 6), ("reverse:2", 6), ("keep", 0), ("auto:1GiB", 0)])
def test_measure_with_a_policy(capsys, policy, replays):
    status, out, _ = call(capsys, "measure", "@make", "--input", "2,8", "--policy", policy, "--json")
    assert (status, json.loads(out)["replays"]) == (0, replays)


def test_measure_and_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert call(capsys, "measure", "@make", "--input", "2,8", "--plot", str(tmp_path / "step.png"))[0] == 0
    assert (tmp_path / "step.png").exists()
    for bad in ("step.nonsense", "nowhere/step.png"):
        status, _, err = call(capsys, "measure", "@make", "--input", "2,8", "--plot", str(tmp_path / bad))
        assert (status, err.count("\n")) == (2, 1)


def test_an_instance_will_do(capsys):
    assert call(capsys, "measure", "@instance", "--input", "2,8")[0] == 0


def test_plan(capsys):
    arguments = (
        "--input",
        "2,8",
        "--card",
        "1MiB",
        "--budget",
        "1MB",
        "--policy",
        "reverse:2",
        "--optimizer-states",
        "2",
    )
    status, out, err = call(capsys, "plan", "@make", *arguments)
    assert (status, err) == (0, "")
    for word in ("kept", "checkpointed", "reversed", "Auto(1MB)", "Reverse(anchor_every=2)", "yes", "optimizer"):
        assert word in out


def test_plan_for_machines_and_a_card_that_is_too_small(capsys):
    status, out, _ = call(capsys, "plan", "@make", "--input", "2,8", "--card", "1KiB", "--json")
    found = json.loads(out)
    assert status == 1
    assert [row["policy"] for row in found["rows"]] == ["kept", "checkpointed", "reversed"]
    assert not any(row["fits"] for row in found["rows"])


def test_bench(capsys):
    status, out, err = call(capsys, "bench", "@make", "--input", "2,8", "--rounds", "1", "--policy", "reverse:2")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "MiB" in line or "KiB" in line}
    assert list(rows) == ["kept", "checkpointed", "reversed", "reverse:2"]
    assert rows["kept"].count("1.00x") == 2
    assert [row[-1] for row in rows.values()] == ["0", "6", "6", "6"]  # replays


def test_bench_for_machines_with_a_budget_that_cannot_be_met(capsys):
    arguments = ("--input", "64,8", "--json", "--rounds", "2", "--policy", "auto:1", "--policy", "auto:1MiB")
    status, out, _ = call(capsys, "bench", "@make", *arguments)
    rows = {row["policy"]: row for row in json.loads(out)["rows"]}
    assert status == 1
    assert "cannot be met" in rows["auto:1"]["failed"]
    assert rows["auto:1"]["seconds"] is None
    assert rows["reversed"]["activations"] < rows["kept"]["activations"]
    assert rows["auto:1MiB"]["activations"] == rows["kept"]["activations"]
    assert all(len(row["rounds"]) == 2 for row in rows.values() if row["failed"] is None)


def test_bench_stopped_by_ctrl_c(capsys, monkeypatch):
    original, calls = bench.measure, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(bench, "measure", interrupted)
    status, out, _ = call(capsys, "bench", "@make", "--input", "2,8")
    assert status == 130
    assert "checkpointed" in out
    assert "reversed" not in out


def test_ctrl_c_and_a_reader_that_goes_away(capsys, monkeypatch):
    def stopped(args):
        raise KeyboardInterrupt

    def unread(args):
        raise BrokenPipeError

    redirected = []
    monkeypatch.setattr(cli.os, "dup2", lambda *descriptors: redirected.append(descriptors))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    for run, status in ((stopped, 130), (unread, 141)):
        monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("demo", "x", "x", lambda sub: None, run))
        assert call(capsys, "demo")[0] == status
    assert len(redirected) == 1


def test_check(capsys):
    status, out, _ = call(capsys, "check", "@make", "--input", "2,8")
    assert (status, bool(out)) == (0, True)
    status, out, _ = call(capsys, "check", "@make", "--input", "2,8", "--json")
    assert json.loads(out)["ok"] is True


def test_check_that_finds_something(capsys):
    status, out, _ = call(capsys, "check", "@wrong", "--input", "2,8", "--json")
    assert status == 1
    assert json.loads(out)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "no_such_module:make", "--input", "2,8"], "cannot import 'no_such_module'"),
        (["measure", "broken_of_the_cli_tests:make", "--input", "2,8"], "ZeroDivisionError"),
        (["measure", "@nothing", "--input", "2,8"], "has no 'nothing'"),
        (["measure", "make", "--input", "2,8"], "package.module:factory"),
        (["measure", "@fails", "--input", "2,8"], "OSError: no weights"),
        (["measure", "@number", "--input", "2,8"], "int"),
        (["measure", "@make"], "--input 2,128,64"),
        (["measure", "@make", "--input", "2,9"], "fails on 2,9"),
        (["measure", "@make", "--input", "2,x"], "--input 2,x"),
        (["measure", "@make", "--input", "2,-8"], "--input 2,-8"),
        (["measure", "@make", "--input", ""], "a shape is written"),
        (["measure", "@make", "--input", "2,8:float99"], "float99"),
        (["measure", "@make", "--input", "2,8:nn"], "dtype"),
        (["measure", "@make", "--input", "2,8", "--policy", "hope"], "reverse:16"),
        (["measure", "@make", "--input", "2,8", "--policy", "reverse:0"], "anchor_every"),
        (["measure", "@make", "--input", "2,8", "--policy", "auto:much"], "much"),
        (["measure", "@plain", "--input", "2,8", "--policy", "keep"], "no Reversible"),
        (["measure", "@make", "--input", "2,8", "--device", "toaster"], "toaster"),
        (["measure", "@make", "--input", "2,8", "--device", "xpu:77"], "--device xpu:77"),
        (["check", "@make", "--input", "2,9"], "fails on 2,9"),
        (["plan", "@fails", "--input", "2,8"], "OSError: no weights"),
        (["plan", "@make", "--input", "2,9"], "fails on 2,9"),
        (["plan", "@plain", "--input", "2,8"], "no Reversible"),
        (["plan", "@make", "--input", "2,8", "--card", "lots"], "--card"),
        (["plan", "@make", "--input", "2,8", "--budget", "lots"], "--budget"),
        (["plan", "@make", "--input", "2,8", "--budget", "0"], "--budget 0: a size such as 8GiB, or a fraction"),
        (["plan", "@make", "--input", "2,8", "--budget", "0.5"], "needs --card"),
        (["plan", "@make", "--input", "2,8", "--optimizer-states", "-1"], "--optimizer-states must be 0 or more"),
        (["measure", "@make", "--input", "2,8", "--autocast", "int3"], "int3"),
        (["bench", "@make", "--input", "2,9"], "fails on 2,9"),
        (["bench", "@plain", "--input", "2,8"], "no Reversible"),
        (["bench", "@make", "--input", "2,8", "--rounds", "0"], "--rounds must be 1 or more"),
        (["bench", "@make", "--input", "2,8", "--policy", "hope"], "reverse:16"),
        (["frobnicate"], "frobnicate"),
        ([], "command"),
    ],
)
def test_a_bad_call_is_one_sentence_and_status_2(capsys, arguments, words):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.startswith("retrograd")
    assert err.count("\n") == 1


def test_a_traceback_for_those_who_ask(capsys):
    status, _, err = call(capsys, "measure", "@fails", "--input", "2,8", "--traceback")
    assert status == 2
    assert "Traceback" in err


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_shows_an_example(capsys, command):
    status, out, _ = call(capsys, command, "--help")
    assert status == 0
    assert "example:\n  " + cli.COMMANDS[command].example in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_a_command_is_one_registration(capsys, monkeypatch):
    greet = cli.Command("greet", "say hello", "retrograd greet", lambda sub: None, lambda args: cli.Outcome("hello"))
    monkeypatch.setitem(cli.COMMANDS, "greet", greet)
    assert call(capsys, "greet") == (0, "hello\n", "")
    assert "greet" in call(capsys, "completion", "bash")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(capsys, shell):
    status, out, _ = call(capsys, "completion", shell)
    assert status == 0
    for word in (*cli.COMMANDS, "optimizer-states", "rounds", "seconds", "bf16"):
        assert word in out
    assert "%(" not in out


def test_completion_in_bash(capsys):
    _, script, _ = call(capsys, "completion", "bash")
    cases = {
        "me": "measure",
        "measure --pl": "--plot",
        "demo --sec": "--seconds",
        "bench --autocast ": "bf16 fp16",
        "completion z": "zsh",
        "demo --data ": "",  # nothing of ours: bash goes on to files
    }
    for words in cases:
        typed = " ".join(f"'{word}'" for word in ["retrograd", *words.split(" ")])
        script += f"\nCOMP_WORDS=({typed}); COMP_CWORD={words.count(' ') + 1}; _retrograd"
        script += '; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(cases.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_completion_in_fish(capsys):
    _, script, _ = call(capsys, "completion", "fish")
    script += "\ncomplete -C 'retrograd bench --ro'\ncomplete -C 'retrograd completion z'"
    done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["--rounds\tsteps that are timed (default: 5)", "zsh"]


def test_python_dash_m(tmp_path):
    (tmp_path / "beside.py").write_text(MODELS)
    done = subprocess.run([sys.executable, "-m", "retrograd", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"retrograd {__version__}\n")
    arguments = ["measure", "beside:make", "--input", "2,8"]
    program = "import sys; from retrograd.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


def test_json_has_no_word_for_infinity(capsys):
    status, out, _ = call(capsys, "check", "@grows", "--input", "2,8", "--json")
    assert status == 1

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(out, parse_constant=refuse)
    assert "inf" in [gradient["error"] for gradient in found["gradients"]]


def test_a_fraction_as_the_budget_of_a_policy(capsys):
    status, out, _ = call(capsys, "measure", "@make", "--input", "2,8", "--policy", "auto:0.5")
    assert status == 0
    assert "one step on" in out
