"""`torch.distributed.pipelining` in two gloo processes: gradients equal those of one process with kept activations.

The rows are in workers_pipeline.py; the processes that run them in processes.py.
"""

import pytest
import workers_pipeline
from processes import Processes

pytestmark = pytest.mark.xdist_group("distributed")  # the processes of test_distributed.py


@pytest.mark.parametrize("name", workers_pipeline.ROWS)
def test_as_in_one_process(pair: Processes, name: str) -> None:
    pair.run(workers_pipeline, name)
