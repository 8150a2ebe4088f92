"""How far `plan` is from the truth: predicted and measured peaks of whole steps, side by side.

    python benchmarks/plan_accuracy.py --config A C --device cuda

Prints a table and writes a dated file under results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import retrograd as rg  # noqa: E402
from bench import commit  # noqa: E402
from configurations import CONFIGURATIONS, Configuration  # noqa: E402
from networks import make_blocks, make_input  # noqa: E402
from retrograd.plan import checkpointed  # noqa: E402
from worker import machine  # noqa: E402


def compare(configuration: Configuration, device: torch.device) -> list[dict[str, object]]:
    """For each policy: the peak that was planned, the peak that was measured, and how far off the plan is."""
    model = rg.ReversibleSequence(make_blocks(configuration, device, seed=0))
    x = make_input(configuration, device, seed=0)
    planned = rg.plan(model, x, device=device, autocast=torch.bfloat16)
    rows = []
    for row in planned.rows:
        model.policy = rg.Keep() if row.policy == "kept" else rg.Reverse()
        with checkpointed([model]) if row.policy == "checkpointed" else nullcontext():
            measured = rg.measure(model, x, autocast=torch.bfloat16).peak
        found = {"configuration": configuration.name, "policy": row.policy, "planned": row.peak, "measured": measured}
        rows.append(found | {"off": row.peak / measured - 1})
        print(f"{configuration.name:6}{row.policy:14}{row.peak:>16,}{measured:>16,}{row.peak / measured - 1:>+9.1%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=["tiny"], choices=CONFIGURATIONS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"{'':6}{'':14}{'planned':>16}{'measured':>16}{'off':>9}")
    rows = [row for name in options.config for row in compare(CONFIGURATIONS[name], device)]
    date = str(datetime.date.today())
    results = {"date": date, "commit": commit(), "machine": machine(device), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{date}-plan-accuracy-{device.type}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
