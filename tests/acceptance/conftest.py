"""The processes that the distributed tests share, and the examples, which some of them drive."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Processes

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the processes inherit it


def started(factory: pytest.TempPathFactory, world: int) -> Iterator[Processes]:
    processes = Processes(factory.mktemp(f"processes{world}"), world)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    yield from started(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    yield from started(tmp_path_factory, 4)
