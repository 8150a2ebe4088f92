"""examples/train_distributed.py: what it promises of checkpoints, of ranks that die, and of bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import workers_example
from processes import Processes

import train_distributed as example

together = pytest.mark.xdist_group("distributed")  # tests that share processes run in one worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
OPTIONS = [*(f"--{name}={value}" for name, value in workers_example.TINY.items()), "--exact"]
STEPS = 24


@contextmanager
def torchrun(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as agent:
        try:
            yield agent
        finally:
            agent.terminate()  # it stops its ranks


def losses(directory: Path) -> dict[int, set[float]]:
    """Every loss that was logged for each step."""
    logged: dict[int, set[float]] = {}
    for line in (directory / "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        logged.setdefault(entry["step"], set()).add(entry["loss"])
    return logged


@together
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks of torchrun in /proc")
def test_a_killed_rank(pair: Processes, tmp_path: Path) -> None:
    """Rank 1 dies at any moment; torchrun starts both again, and the losses are those of a run that was left alone.

    To the bit, though the run goes on with a step that reverses what the other one keeps.
    """
    interrupted, alone = tmp_path / "interrupted", tmp_path / "alone"
    command = ["--max-restarts=1", str(EXAMPLE), *OPTIONS, f"--steps={STEPS}", f"--checkpoints={interrupted}"]
    with torchrun(*command) as agent:
        while not list(interrupted.glob("step-*")) and agent.poll() is None:
            time.sleep(0.02)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    assert "resumes at step" in output

    pair.run(workers_example, "train", directory=alone, steps=STEPS)
    assert losses(interrupted) == losses(alone)
    assert sorted(losses(alone)) == list(range(STEPS))
    assert all(len(values) == 1 for values in losses(alone).values())


def test_a_killed_save(tmp_path: Path) -> None:
    """Whenever the kill comes: the newest checkpoint is the one before or the new one, and whole."""
    script = Path(__file__).with_name("killed_saves.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = ran.stdout.split()
    assert found == sorted(found)
    assert min(found.count("2"), found.count("3")) >= 5
    assert len(found) == found.count("2") + found.count("3")


@together
def test_other_numbers_of_ranks(pair: Processes, four: Processes, tmp_path: Path) -> None:
    """What two ranks save, four load and save, two load and save, and one loads: every weight and every moment."""
    for processes in (pair, four, pair):
        processes.run(workers_example, "save", directory=tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoints, step, model, optimizer = workers_example.resumed(tmp_path)
        assert step == 3
        checkpoints.shape["depth"] = 3
        with pytest.raises(ValueError, match=r"is of a model with {'depth': 2, 'width': 16}, not {'depth': 3, "):
            checkpoints.load(model, optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--steps=0", "--steps must be 1 or more, not 0"),
        ("--batch=5", "--batch 5 cannot be divided among 2 ranks; give a multiple of 2"),
        ("--budget=plenty", "plenty"),
        ("--width=33", "width 33 must be an even number of channels"),
        ("--dropout=2", "dropout must be a probability below 1, not 2.0"),
    ],
)
def test_bad_options(
    option: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_distributed.py", option])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        example.parse()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert complaint in line


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_distributed.py"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        example.parse()
    assert "torchrun --nproc-per-node=2 examples/train_distributed.py" in capsys.readouterr().err


@together
def test_nan(pair: Processes) -> None:
    pair.run(workers_example, "nan")
