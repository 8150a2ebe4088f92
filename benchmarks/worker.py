"""Measure one contender on one configuration, in a process of its own: `python worker.py '{"task": ..., ...}'`.

`bench.py` starts it and reads its standard output, where lines that begin with MARK carry JSON. Gradients are compared
with those of kept activations before anything is timed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

MARK = "retrograd-bench: "
WRONG_ABOVE = 0.005  # relative error of all weights' gradients together, and of the loss
IN_A_ROW = 2  # steps of a contender, and as many of what it is compared with, in turn
WRONG_TENSOR_ABOVE = 0.2  # the same for the worst single tensor, which bf16 rounding alone can move by 0.01


def say(**message: Any) -> None:
    """Tell bench.py something."""
    print(MARK + json.dumps(message), flush=True)


if __name__ == "__main__":  # before torch, which takes seconds to come
    say(phase="starting")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from configurations import Configuration  # noqa: E402
from contenders import CONTENDERS, Contender, Network, Skip, Step  # noqa: E402
from networks import Blocks, make_blocks, make_input, parameters  # noqa: E402


class Bench:
    """One network of one size with its input, and the contender that is to run it."""

    def __init__(self, configuration: Configuration, contender: Contender, device: torch.device, seed: int) -> None:
        self.configuration, self.contender, self.device = configuration, contender, device
        self.blocks: Blocks = make_blocks(configuration, device, seed)
        self.x = make_input(configuration, device, seed)
        self.fixed = sum(2 * p.nbytes for p in parameters(self.blocks)) + self.x.nbytes

    def step(self, contender: Contender, *, around: bool = True) -> Step:
        """Forward, loss and backward of a contender's network."""
        step = make_step(contender.build(self.blocks, self.x), self.x)
        return contender.around(step, self.x) if around and contender.around else step

    def smaller(self, size: Configuration) -> Bench:
        """The same network cut to fewer blocks and tokens."""
        other = object.__new__(Bench)
        other.configuration, other.contender, other.device = size, self.contender, self.device
        other.blocks = self.blocks[: size.blocks]
        other.x = self.x.detach()[:, : size.tokens].clone().requires_grad_()
        return other


def make_step(network: Network, x: Tensor) -> Step:
    """A training step without optimizer: float32 streams, bfloat16 autocast. Gradients add up where they are."""

    def step() -> Tensor:
        x.grad = None
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = network(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    return step


# Gradients


def reference(bench: Bench) -> tuple[Bench, list[Tensor], float]:
    """Gradients and loss of kept activations; where these do not fit in memory, of half of the blocks, and so on."""
    kept = CONTENDERS[bench.contender.gradients_of]
    size = bench.configuration.for_check()
    while True:
        small = bench if size == bench.configuration else bench.smaller(size)
        try:
            expected, loss, _ = gradients(small, small.step(kept, around=False), watch=False)
            return small, expected, loss
        except torch.OutOfMemoryError:
            if size.blocks == 1:
                raise
        size = replace(size, blocks=size.blocks // 2)
        del small
        release(bench)


def check(bench: Bench, step: Step, expected: list[Tensor], kept_loss: float) -> dict[str, Any]:
    """Run a step and compare its loss and every gradient with those of kept activations."""
    watch = not bench.contender.compiled and bench.contender.around is None
    seen, loss, precisions = gradients(bench, step, watch=watch)
    difference = [(s - e).norm().item() for s, e in zip(seen, expected, strict=True)]
    size = [e.norm().item() for e in expected]
    error = math.hypot(*difference[1:]) / math.hypot(*size[1:])  # the first is the input's, which is mostly a copy
    worst = max(d / s if s else float(d > 0) for d, s in zip(difference, size, strict=True))
    right = error <= WRONG_ABOVE and worst <= WRONG_TENSOR_ABOVE and abs(loss - kept_loss) <= WRONG_ABOVE * kept_loss
    return {
        "loss": loss,
        "kept_loss": kept_loss,
        "gradient_error": error,
        "gradient_error_worst_tensor": worst,
        "wrong": not right,
        "precisions": precisions,
        "checked_blocks": bench.configuration.blocks,
        "checked_tokens": bench.configuration.tokens,
    }


def gradients(bench: Bench, step: Step, *, watch: bool) -> tuple[list[Tensor], float, list[str]]:
    """The gradients of one step on the host, its loss, and the precisions in which linear layers ran."""
    for parameter in parameters(bench.blocks):
        parameter.grad.zero_()
    torch.manual_seed(0)  # dropout draws the same numbers for every contender
    with linear_precisions(bench.blocks if watch else []) as precisions:
        loss = step().item()
    tensors = [bench.x.grad, *(parameter.grad for parameter in parameters(bench.blocks))]
    zero = torch.zeros_like(bench.x)
    return [(zero if tensor is None else tensor).to("cpu", copy=True) for tensor in tensors], loss, sorted(precisions)


@contextmanager
def linear_precisions(blocks: Blocks) -> Iterator[set[str]]:
    """Watch which dtypes linear layers return. More than one: something was recomputed in another precision."""
    precisions: set[str] = set()

    def seen(module: nn.Module, args: Any, out: Tensor) -> None:
        precisions.add(str(out.dtype).removeprefix("torch."))

    layers = [layer for pair in blocks for network in pair for layer in network.modules() if type(layer) is nn.Linear]
    handles = [layer.register_forward_hook(seen) for layer in layers]
    try:
        yield precisions
    finally:
        for handle in handles:
            handle.remove()


# Time and memory


def timed(run: Callable[[], Any], device: torch.device, warmups: int, steps: int, phase: str) -> list[float]:
    """Seconds of each run, after the warm-ups."""
    seconds = []
    for index in range(warmups + steps):
        say(phase=f"{phase} {index + 1}/{warmups + steps}")
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[warmups:]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release(bench: Bench) -> None:
    """Free what a step left."""
    bench.x.grad = None
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def peak_of(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that were allocated at one time while it ran, above what was allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return allocator_peak(run)


def allocator_peak(run: Callable[[], Any]) -> int:
    """The same on a CPU, from the allocator's own record.

    `retrograd.measure.LiveBytes` cannot be used for every contender: a dispatch mode makes compiled code run eagerly,
    and does not see that memcnn frees a storage by resizing it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def live_bytes(run: Callable[[], Any]) -> int:
    """The same, counted by retrograd: what operators return, without what they allocate and free inside."""
    from retrograd.measure import LiveBytes

    with LiveBytes() as memory:
        run()
    return memory.peak


def measure(bench: Bench) -> dict[str, Any]:
    """Check, then memory and time of a step."""
    device, contender = bench.device, bench.contender
    say(phase="keeping activations")
    small, expected, kept_loss = reference(bench)
    release(small)
    release(bench)
    base = allocated(device)  # weights, gradients, input, and what libraries hold since their first use
    say(phase="checking gradients")
    steps: list[Step] = []
    built = peak_of(lambda: steps.append(small.step(contender)), device) if contender.around else 0
    step = steps.pop() if steps else small.step(contender)
    result = check(small, step, expected, kept_loss)
    say(partial=result)
    del expected
    whole = small is bench
    if not whole:
        del small
        step = bench.step(contender)
    release(bench)
    result |= run(bench, step, base, whole)
    result["memory_bytes"] = max(built, result["memory_bytes"])  # a captured step allocates as it is captured
    if contender is CONTENDERS["kept"]:
        result |= in_milliseconds("forward", forward_times(bench, graph=False))
        result |= in_milliseconds("forward_graph", forward_times(bench, graph=True))
    tokens = bench.configuration.batch * bench.configuration.tokens
    return result | {"tokens_per_second": 1e3 * tokens / result["step_ms"]}


def run(bench: Bench, step: Step, base: int, whole: bool) -> dict[str, Any]:
    """Peak memory above `base` and time of a step. `whole`: the step that it is compared with fits too."""
    device, configuration = bench.device, bench.configuration
    held = allocated(device) - base  # what the contender keeps between steps is its memory too
    if configuration.steps == 1:  # the one step there is gives both
        seconds: list[float] = []
        peak = peak_of(lambda: seconds.extend(timed(step, device, 0, 1, "step")), device)
        return {"memory_bytes": held + peak} | in_milliseconds("step", seconds)
    timed(step, device, 0, configuration.warmups, "warm-up")
    release(bench)
    say(phase="memory")
    held = allocated(device) - base + (0 if bench.contender.around else for_graphs(device))
    result: dict[str, Any] = {"memory_bytes": held + peak_of(step, device)}
    if device.type == "cpu" and not bench.contender.compiled:
        result["live_bytes"] = live_bytes(step)
    step()  # after a profiler, one more to settle
    compared = CONTENDERS[bench.contender.time_of]
    if whole and compared is not bench.contender and not bench.contender.compiled:
        # Other work on the machine comes and goes, so they run in turn, and the ratio is the median of those of the
        # rounds: a few steps of each, since the first after the other's finds memory and caches as the other left them.
        beside, once_more = bench.step(compared, around=False), forward(bench, compared, graph=True)
        rounds = [
            (
                timed(beside, device, 1, IN_A_ROW, "step of what it is compared with"),
                timed(once_more, device, 1, IN_A_ROW, "forward of what it is compared with"),
                timed(step, device, 1, IN_A_ROW, "step"),
            )
            for _ in range(configuration.steps // IN_A_ROW + 1)
        ]
        for column, what in enumerate(("beside", "beside_forward", "step")):
            result |= in_milliseconds(what, [second for each in rounds for second in each[column]])
        result["to_beside"] = statistics.median(sum(own) / sum(other) for other, _, own in rounds)
        result["to_floor"] = statistics.median(sum(own) / (sum(other) + sum(once)) for other, once, own in rounds)
    else:
        result |= in_milliseconds("step", timed(step, device, 0, configuration.steps, "step"))
    if bench.contender.around is not None:  # launched without waiting, as in training: the host works ahead
        together = timed(lambda: [step() for _ in range(configuration.steps)], device, 0, 1, "steps in a row")
        result["step_ms_in_a_row"] = 1e3 * together[0] / configuration.steps
    return result


def allocated(device: torch.device) -> int:
    """Bytes that are allocated now; not known on a CPU, where it does not matter."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def for_graphs(device: torch.device) -> int:
    """Bytes that are set aside for CUDA graphs and not allocated: a graph uses them whenever it is launched."""
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def forward(bench: Bench, contender: Contender, *, graph: bool) -> Callable[[], None]:
    """A forward: recomputing costs one more of these, so kept plus this is its floor.

    Whatever recomputes for a backward needs autograd's graph once more; without it, a forward is faster.
    """
    network = contender.build(bench.blocks, bench.x)

    def run() -> None:
        with torch.set_grad_enabled(graph), torch.autocast(bench.device.type, torch.bfloat16):
            network(bench.x)

    return run


def forward_times(bench: Bench, *, graph: bool) -> list[float]:
    """Seconds of forwards."""
    once = forward(bench, bench.contender, graph=graph)
    return timed(once, bench.device, bench.configuration.warmups, bench.configuration.steps, "forward")


def in_milliseconds(what: str, seconds: list[float]) -> dict[str, Any]:
    """Median, minimum and all of them."""
    milliseconds = [1e3 * second for second in seconds]
    return {
        f"{what}_ms": statistics.median(milliseconds),
        f"{what}_ms_min": min(milliseconds),
        f"{what}_ms_all": [round(value, 4) for value in milliseconds],
    }


# The largest network or batch that fits


def largest(make: Callable[[int], Bench], axis: str, budget: int) -> dict[str, Any]:
    """The largest size whose weights, gradients, input and activations fit in `budget` bytes, and its speed."""
    least = 64 if axis == "tokens" else 1
    bench, expected, kept_loss = reference(make(least))
    result = {"axis": axis, "budget_bytes": budget} | check(bench, bench.step(bench.contender), expected, kept_loss)
    tried: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        say(phase=f"trying {axis} {size}")
        tried[size] = total_peak(make, size)
        say(partial={"tried": tried, "largest": max((s for s, t in tried.items() if t and t <= budget), default=0)})
        return tried[size] is not None and tried[size] <= budget

    low, high = 0, least
    while fits(high):
        low, high = high, 2 * high
    while low and high - low > max(1, low // 32):  # to three percent
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    result |= {"largest": low, "tried": tried}
    if not low:
        return result
    bench = make(low)
    seconds = timed(bench.step(bench.contender), bench.device, 1, 3, f"{axis} {low}, step")
    tokens = bench.configuration.batch * bench.configuration.tokens
    return result | in_milliseconds("step", seconds) | {"tokens_per_second": tokens / statistics.median(seconds)}


def total_peak(make: Callable[[int], Bench], size: int) -> int | None:
    """All bytes that a step needs, weights and gradients included; None where the device has not so many."""
    bench = None
    try:
        bench = make(size)
        step = bench.step(bench.contender)
        step()
        bench.x.grad = None
        return bench.fixed + peak_of(step, bench.device)
    except torch.OutOfMemoryError:
        return None
    finally:
        step = None
        if bench is not None:
            release(bench)


# The job


def machine(device: torch.device) -> dict[str, Any]:
    """What this runs on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def cpu_name() -> str:
    """The model of the CPU, where Linux tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Do what the job says; whatever goes wrong is its result."""
    device = torch.device(job["device"])
    configuration = Configuration(**job["configuration"])
    contender = CONTENDERS[job["contender"]]
    try:
        say(machine=machine(device))
        if job["task"] == "largest":

            def make(size: int) -> Bench:
                return Bench(replace(configuration, **{job["axis"]: size}), contender, device, job["seed"])

            return {"status": "ok"} | largest(make, job["axis"], job["budget"])
        return {"status": "ok"} | measure(Bench(configuration, contender, device, job["seed"]))
    except Skip as reason:
        return {"status": "skipped", "reason": str(reason)}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "reason": str(error).split("\n")[0]}
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return {"status": "failed", "reason": f"{type(error).__name__}: {lines[0]}"}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' deprecations; this process is ours alone
    say(result=perform(json.loads(sys.argv[1])))
