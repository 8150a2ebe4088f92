"""Errors in a distributed step, on one rank or on all: no rank hangs, each says why, and training can go on.

The rows are in workers_faults.py. For ranks that die, see test_train_distributed.py.
"""

from pathlib import Path

import pytest
import workers_faults
from processes import Processes

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("name", workers_faults.ROWS)
def test_fault(pair: Processes, tmp_path: Path, name: str) -> None:
    pair.run(workers_faults, name, meeting=str(tmp_path / "meeting"))
