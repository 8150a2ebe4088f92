"""DDP, FSDP2 and tensor parallel in two gloo processes: gradients equal those of one process with kept activations.

The rows are in workers.py. Here is only the pair of processes that runs them: started once, asked for one row at a
time. After a row that fails they meet in a new process group, since it may have left half a collective in the old one;
if one of them hangs or dies, both are replaced.
"""

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch.multiprocessing as mp
import workers

SECONDS_TO_START, SECONDS_PER_ROW, SECONDS_OF_GRACE = 60, 40, 3

pytestmark = pytest.mark.xdist_group("distributed")  # with --dist loadgroup: one pair of processes, not one per worker


class Pair:
    """Two processes that run rows."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.meeting = directory, 0
        self.processes: list[mp.Process] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(workers.WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(target=workers.serve, args=(rank, theirs), daemon=True)
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

    def run(self, name: str) -> dict[int, str]:
        """The failures of a row: for each rank that failed, its traceback."""
        deadline = time.monotonic() + SECONDS_PER_ROW
        if not self.processes:
            self.start()
            deadline += SECONDS_TO_START
        for connection in self.connections:
            connection.send((name, str(self.directory / f"meeting{self.meeting}")))
        awaited = dict(zip(self.connections, range(workers.WORLD), strict=True))
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


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("distributed"))
    yield pair
    pair.stop()


@pytest.mark.parametrize("name", workers.ROWS)
def test_as_in_one_process(pair: Pair, name: str) -> None:
    if failures := pair.run(name):
        pytest.fail("\n".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())), pytrace=False)
