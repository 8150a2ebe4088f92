"""Run every contender, one process each, and write a dated result file: `python benchmarks/bench.py --config small`.

What is measured is in configurations.py, who competes in contenders.py, how in worker.py; report.py makes the table
and the plots. Results are written after each contender, so whatever breaks later costs nothing already measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import report
from configurations import AXES, CONFIGURATIONS, SPECIAL, Configuration, sweep

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MARK = "retrograd-bench: "
Job = dict[str, Any]
Result = dict[str, Any]


# What to run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", nargs="+", default=[], metavar="NAME", help=f"sizes: {', '.join(CONFIGURATIONS)}")
    add("--contenders", nargs="+", default=["all"], metavar="NAME", help="names or patterns; all; --list shows them")
    add("--without", nargs="+", default=[], metavar="NAME", help="names or patterns to leave out")
    add("--sweep", nargs="+", default=[], metavar="AXIS[=N,N]", help=f"vary {', '.join(AXES)} of each --config")
    add(
        "--largest", nargs="+", default=[], metavar="AXIS=BYTES", help="largest batch or blocks in so many bytes (8GiB)"
    )
    add("--special", nargs="+", default=[], choices=SPECIAL, help="runs with contenders of their own")
    add("--device", default=None, help="cpu or cuda (cuda where there is one)")
    add("--out", type=Path, default=HERE / "results", help="folder of the result file and the plots")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=None, help="steps to time, where the configuration's own are too few")
    add("--timeout", type=float, default=240, metavar="S", help="seconds for one contender")
    add("--limit", type=float, default=None, metavar="S", help="seconds for everything; what is left then is not run")
    add("--list", action="store_true", help="show the contenders and stop")
    options = parser.parse_args()
    if unknown := set(options.config) - set(CONFIGURATIONS):
        parser.error(f"no configuration {', '.join(sorted(unknown))}; there are {', '.join(CONFIGURATIONS)}")
    if not (options.config or options.special):
        options.config = ["small"]
    return options


def contender_names() -> dict[str, Any]:
    """The contenders, imported late: torch takes seconds to come."""
    sys.path.insert(0, str(ROOT / "src"))
    from contenders import CONTENDERS

    return CONTENDERS


def chosen(options: argparse.Namespace) -> list[str]:
    """The contenders asked for, each after those it is compared with."""
    contenders = contender_names()
    for pattern in options.contenders:
        if pattern != "all" and not any(fnmatch(name, pattern) for name in contenders):
            sys.exit(f"no contender {pattern!r}; there are: {', '.join(contenders)}")
    names = {
        name
        for name in contenders
        if any(pattern == "all" or fnmatch(name, pattern) for pattern in options.contenders)
        and not any(fnmatch(name, pattern) for pattern in options.without)
    }
    needed = names | {contenders[name].time_of for name in names}
    return [name for name in contenders if name in needed]


def jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """Everything to run, in order."""
    names = chosen(options)
    configurations = [CONFIGURATIONS[name] for name in options.config]
    if options.steps is not None:
        configurations = [replace(configuration, steps=options.steps) for configuration in configurations]
    common = {"device": device, "seed": options.seed}
    listed: list[Job] = []
    for configuration in configurations:
        sizes = [configuration]
        if options.sweep:
            sizes = [size for axis, values in axes(options.sweep) for size in sweep(configuration, axis, values)]
        if options.largest:
            for axis, budget in budgets(options.largest):
                listed += [job("largest", configuration, name, common, axis=axis, budget=budget) for name in names]
        else:
            listed += [job("measure", size, name, common) for size in sizes for name in names]
    for special in options.special:
        sizes, own = SPECIAL[special]
        listed += [job("measure", CONFIGURATIONS[size], name, common) for size in sizes for name in own]
    return listed


def job(task: str, configuration: Configuration, contender: str, common: Job, **more: Any) -> Job:
    return {"task": task, "configuration": configuration.as_dict(), "contender": contender, **common, **more}


def axes(texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """`blocks=4,16` or `blocks` as an axis and its sizes."""
    parsed = []
    for text in texts:
        axis, _, sizes = text.partition("=")
        if axis not in AXES:
            sys.exit(f"cannot vary {axis!r}; there are {', '.join(AXES)}")
        parsed.append((axis, tuple(int(size) for size in sizes.split(",")) if sizes else AXES[axis]))
    return parsed


def budgets(texts: list[str]) -> list[tuple[str, int]]:
    """`batch=8GiB` as an axis and bytes."""
    parsed = []
    for text in texts:
        found = re.fullmatch(r"(batch|blocks|tokens)=([\d.]+)\s*(|[KMGT]i?)B?", text)
        if not found:
            sys.exit(f"--largest takes batch=8GiB, blocks=512MiB or tokens=16GiB, not {text!r}")
        axis, number, unit = found.groups()
        base = 1024 if unit.endswith("i") or not unit else 1000
        parsed.append((axis, int(float(number) * base ** " KMGT".index((unit or " ")[0]))))
    return parsed


# Running it


def run_job(job: Job, timeout: float, show: Callable[[str], None]) -> Result:
    """One contender in a process of its own. It always gives a result, be it why there is none."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), str(HERE / ".peers")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    result: Result = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # compile workers end with it
        )
        reader = threading.Thread(target=listen, args=(process, result, show), daemon=True)
        reader.start()
        try:
            code = process.wait(timeout)
            reader.join(5)
        except subprocess.TimeoutExpired:
            code = None
            result |= {"status": "timeout", "reason": f"not done after {timeout:.0f} s ({result.pop('phase', '')})"}
        finally:
            end(process)
        result.pop("phase", None)
        if "status" not in result:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            result |= {"status": "failed", "reason": f"exit status {code}: {last}"}
        return result


def clocked(job: Job, timeout: float, show: Callable[[str], None]) -> Result:
    """A job with what it took, and how busy the machine was before: times from a busy one are worth little."""
    load, start = os.getloadavg()[0], time.monotonic()
    result = run_job(job, timeout, show)
    return result | {"job_seconds": round(time.monotonic() - start, 1), "load_before": round(load, 2)}


def listen(process: subprocess.Popen, result: Result, show: Callable[[str], None]) -> None:
    """Take in what the worker says as it says it."""
    for line in process.stdout or ():
        if line.startswith(MARK):
            message = json.loads(line.removeprefix(MARK))
            result.update(message.get("result") or message.get("partial") or message)
            if "phase" in message:
                show(message["phase"])


def end(process: subprocess.Popen) -> None:
    """Stop the worker and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Lines:
    """Progress as plain lines, for a pipe."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def begin(self, what: str) -> None:
        self.what = what

    def show(self, phase: str) -> None:
        pass

    def finish(self, outcome: str) -> None:
        self.done += 1
        print(f"[{self.done}/{self.total}] {self.what}: {outcome}", flush=True)


class Bar(Lines):
    """Progress as a bar, for a terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(total)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def show(self, phase: str) -> None:
        self.progress.update(self.task, description=f"{self.what}: {phase}")

    def finish(self, outcome: str) -> None:
        self.progress.console.print(f"{self.what}: {outcome}", markup=False, highlight=False)
        self.progress.advance(self.task)


def progress(total: int) -> Lines:
    """A bar where there is a terminal and rich, else lines."""
    if sys.stdout.isatty():
        try:
            return Bar(total)
        except ImportError:
            pass
    return Lines(total)


# The result file


def commit() -> str | None:
    """The commit that is measured, with + where the tree has changes; RETROGRAD_COMMIT where there is no git."""
    if given := os.environ.get("RETROGRAD_COMMIT"):
        return given
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, text=True)
        return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def save(path: Path, results: Result) -> None:
    """Write the whole file anew, or not at all."""
    report.add_ratios(results["runs"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    options = arguments()
    if options.list:
        for name, contender in contender_names().items():
            print(f"{name:20} {contender.title}")
        return
    device = options.device or device_here()
    now = datetime.now()
    todo = jobs(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{now:%Y-%m-%d-%H%M%S}-{device}.json"
    results: Result = {"date": f"{now:%Y-%m-%d %H:%M:%S}", "commit": commit(), "command": sys.argv[1:], "runs": []}
    titles = {name: contender.title for name, contender in contender_names().items()}
    bases = {name: contender.time_of for name, contender in contender_names().items()}
    begun = time.monotonic()
    with progress(len(todo)) as bar:
        for job in todo:
            bar.begin(f"{job['configuration']['name']} {job['contender']}")
            left = options.timeout if options.limit is None else options.limit - (time.monotonic() - begun)
            if left > 5:
                result = clocked(job, min(left, options.timeout), bar.show)
            else:
                result = {"status": "not run", "reason": f"the limit of {options.limit:.0f} s was reached"}
            machine = result.pop("machine", None)
            results = {**results, "machine": results.get("machine") or machine}
            named = {"title": titles[job["contender"]], "compared_with": bases[job["contender"]]}
            results["runs"].append({**job, **named, **result})
            save(path, results)
            bar.finish(report.outcome(results["runs"][-1]))
    print("\n" + report.tables(results))
    for drawn in report.plots(results, path.with_suffix("")):
        print(f"plot: {drawn}")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
