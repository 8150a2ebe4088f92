"""DDP and FSDP2 in two gloo processes: where the published classes fail, and that ours do not.

The rows are in published_workers.py. It is one test, so that one pair of processes is started, whatever runs the tests.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import published_workers
import pytest
import torch.multiprocessing as mp
from cases import CASES

SECONDS = 200

# How the published classes fare, by row: the beginning of the outcome.
PUBLISHED = {
    "ddp": "right",
    "ddp, unused parameters": "RuntimeError: Expected to mark a variable ready only once",
    "ddp, shared weights": "wrong by",
    "ddp, used twice": "wrong by",
    "ddp, context from an encoder": "RuntimeError: Expected to mark a variable ready only once",
    "fsdp2, blocks": "RuntimeError: .* mixed torch.Tensor and DTensor|TypeError: Invariant encountered",
    "fsdp2, pairs of networks": "right",
}


def outcomes(directory: Path) -> list[dict[str, str]]:
    """What each rank found."""
    workers = mp.start_processes(published_workers.run_rows, (directory,), published_workers.WORLD, join=False)
    deadline = time.monotonic() + SECONDS
    while not workers.join(timeout=5):
        if time.monotonic() > deadline:
            for process in workers.processes:
                process.kill()
            pytest.fail(f"no answer after {SECONDS} seconds")
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(published_workers.WORLD)]


def test_rows(tmp_path: Path) -> None:
    unexpected = []
    for rank, found in enumerate(outcomes(tmp_path)):
        for row, published in PUBLISHED.items():
            for case in CASES:
                for variant, expected in (("published", published), ("ours", "right$")):
                    outcome = found[f"{row}: {variant} {case}"]
                    if not re.match(expected, outcome):
                        unexpected.append(f"rank {rank}, {row}, {variant} {case}: {outcome}")
    if unexpected:
        pytest.fail("\n".join(unexpected), pytrace=False)
    assert PUBLISHED.keys() == published_workers.ROWS.keys()
