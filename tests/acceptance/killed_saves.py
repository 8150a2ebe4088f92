"""A save of examples/train_distributed.py, killed at the first thing that it does to the file system, then at the
second, and so on until it lives. The newest checkpoint that each attempt has left is loaded and compared with what was
saved.

    python killed_saves.py DIRECTORY        # prints the step of the newest checkpoint after each attempt
"""

import functools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a step imports it; here it is imported once for all
import torch.distributed as dist
import workers_example


def die_at(event: int, directory: Path) -> None:
    """Kill this process when it is about to do something to the file system for the so-manieth time."""
    seen = 0

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        changes = name in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        if changes or (name == "open" and str(directory) in str(arguments[0])):
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(audit)


def forked(work: Callable[[], None]) -> int:
    """Run in a process with a group of its own; how it ended."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            work()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def two_saves(directory: Path) -> None:
    for _ in range(2):
        workers_example.save(0, directory)


def third_save(directory: Path, event: int) -> None:
    """It also removes the first checkpoint."""
    workers_example.save(0, directory, lambda: die_at(event, directory))


def look(directories: list[Path]) -> None:
    for directory in directories:
        print(workers_example.resumed(directory)[1], flush=True)


def main(directory: Path) -> None:
    template, attempts, status = directory / "template", [], -signal.SIGKILL
    assert forked(functools.partial(two_saves, template)) == 0
    while status == -signal.SIGKILL:
        attempts.append(directory / str(len(attempts)))
        shutil.copytree(template, attempts[-1])
        status = forked(functools.partial(third_save, attempts[-1], len(attempts) - 1))
    assert status == 0
    assert forked(functools.partial(look, attempts)) == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
