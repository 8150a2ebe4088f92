"""DDP, FSDP2 and tensor parallel in two and four gloo processes: gradients equal those of one process with kept
activations.

The rows are in workers.py, workers_uneven.py and workers_of_four.py; the processes that run them in processes.py.
"""

import pytest
import workers
import workers_of_four
import workers_uneven
from processes import Processes

pytestmark = pytest.mark.xdist_group("distributed")  # with --dist loadgroup: one set of processes, not one per worker


@pytest.mark.parametrize("name", workers.ROWS)
def test_as_in_one_process(pair: Processes, name: str) -> None:
    pair.run(workers, name)


@pytest.mark.parametrize("name", workers_uneven.ROWS)
def test_uneven_ranks(pair: Processes, name: str) -> None:
    pair.run(workers_uneven, name)


@pytest.mark.parametrize("name", workers_of_four.ROWS)
def test_four_as_one_process(four: Processes, name: str) -> None:
    four.run(workers_of_four, name)
