"""Gloo processes for the distributed tests: started once, asked for one row at a time.

Rows are functions in a module of their own (workers.py), registered in its `ROWS`. A row takes its rank, returns
nothing, and fails by raising; every process runs the same row at the same time. After a row that fails, or of a module
whose rows break their group on purpose, the processes meet in a new group, since half a collective may be left in the
old one; if one of them hangs or dies, all are replaced.
"""

import functools
import importlib
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS_TO_START, SECONDS_PER_ROW, SECONDS_OF_GRACE = 60, 40, 3
TIMEOUT = timedelta(seconds=20)

Row = Callable[..., None]


class Rows(dict[str, Row]):
    """The rows of a module, by name. `breaking`: after each of them the processes must meet anew."""

    def __init__(self, *, breaking: bool = False) -> None:
        super().__init__()
        self.breaking = breaking

    def row(self, function: Callable[..., None] | None = None, /, **cases: dict[str, Any]) -> Any:
        """Register a function as a row, or as one row for each case: a name and the arguments after the rank."""
        if function is not None:
            self[function.__name__] = function
            return function

        def register(function: Callable[..., None]) -> Callable[..., None]:
            for case, arguments in cases.items():
                self[f"{function.__name__}-{case}"] = functools.partial(function, **arguments)
            return function

        return register


class Processes:
    """So many processes that run rows."""

    def __init__(self, directory: Path, world: int) -> None:
        self.directory, self.world, self.meeting = directory, world, 0
        self.processes: list[mp.Process] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.world, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed if it dies
            self.processes.append(process)
            self.connections.append(mine)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        self.processes, self.connections = [], []

    def run(self, module: ModuleType, name: str, **arguments: Any) -> None:
        """Run a row in every process; a failure of this test where one of them fails."""
        if failures := self.failures(module.__name__, name, arguments):
            text = "\n".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
            pytest.fail(text, pytrace=False)
        if module.ROWS.breaking:
            self.meeting += 1

    def failures(self, module: str, name: str, arguments: dict[str, Any]) -> dict[int, str]:
        """For each rank that failed, its traceback."""
        deadline = time.monotonic() + SECONDS_PER_ROW
        if not self.processes:
            self.start()
            deadline += SECONDS_TO_START
        for connection in self.connections:
            connection.send((module, name, arguments, str(self.directory / f"meeting{self.meeting}")))
        awaited = dict(zip(self.connections, range(self.world), strict=True))
        failures: dict[int, str] = {}
        while awaited and (ready := wait(list(awaited), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = awaited.pop(connection)
                if (answer := self.receive(rank)) is not None:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + SECONDS_OF_GRACE)
        failures |= dict.fromkeys(awaited.values(), "no answer: it hangs, or waits for the rank that has failed")
        if failures:
            self.meeting += 1
        if awaited or not all(process.is_alive() for process in self.processes):
            self.stop()
        return failures

    def receive(self, rank: int) -> str | None:
        try:
            return self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join()
            return f"the process died with exit code {self.processes[rank].exitcode}"


def serve(rank: int, world: int, commands: Connection) -> None:
    """Run the rows that are asked for, each answered by None or a traceback.

    A command is the module and the name of a row, its arguments, and the file where the process group meets; another
    file than before means that what the last row left in the group is to be forgotten.
    """
    torch.set_num_threads(1)
    met = None
    while True:
        module, name, arguments, meeting = commands.recv()
        torch.set_default_dtype(torch.float64)
        try:
            rows = importlib.import_module(module).ROWS
            if meeting != met:
                if dist.is_initialized():
                    dist.destroy_process_group()
                met = meeting
                dist.init_process_group("gloo", f"file://{met}", timeout=TIMEOUT, rank=rank, world_size=world)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # FSDP2 says this of any module that ends in a Linear on three dimensions, reversible or not.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
                rows[name](rank, **arguments)
        except Exception:
            commands.send(traceback.format_exc())
        else:
            commands.send(None)
