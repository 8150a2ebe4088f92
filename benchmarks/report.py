"""Tables and plots from result files: `python benchmarks/report.py benchmarks/results/*.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

Run = dict[str, Any]
MIB = 2**20
SHORT = {  # names in a plot, where the contender's own is no word
    "auto": "Auto",
    "auto-all": "Auto, all",
    "auto-least": "Auto, least",
    "compile": "compiled",
    "compile-0.0": "compiled, budget 0",
    "compile-0.3": "compiled, budget 0.3",
    "compile-graphed": "compiled in a graph",
    "exact": "ExactAdd",
    "keep": "Keep",
    "keep-graphed": "Keep in a graph",
    "kept": "plain autograd",
    "kept-graphed": "plain autograd in a graph",
    "offload": "Offload",
    "reverse": "Reverse",
    "reverse-anchors": "Reverse(anchor_every=8)",
    "reverse-attention": 'Reverse(save="attention")',
    "reverse-compiled": "Reverse, compiled",
    "reverse-compiled-graphed": "Reverse, compiled, in a graph",
    "reverse-graphed": "Reverse in a graph",
    "reverse-half": "half Keep",
    "reverse-launched": "Reverse(graphed=True)",
    "reverse-launched-compiled": "Reverse(graphed=True), compiled",
    "reverse-momentum": "Momentum",
    "reverse-output": 'Reverse(save="output")',
}
KINDS = {"retrograd": ("o", "tab:green"), "others": ("x", "tab:gray"), "wrong gradients": ("x", "tab:red")}
UNDRAWN = ("exact-keep", "keep-momentum", "momentumnet-kept")  # only there for others to be compared with
DPI = 150
SCALE = ("reverse", "auto", "reverse-half", "keep")  # one network, one join: only the policy differs


def add_ratios(runs: list[Run]) -> None:
    """Give every run its time and memory as a multiple of kept activations, and kept its floor."""
    kept = {(run["configuration"]["name"], run["contender"]): run for run in runs if measured(run)}
    for run in kept.values():
        base = kept.get((run["configuration"]["name"], run["compared_with"]))
        if base is not None:
            # Where they could, steps of the base were run in turn with its own ("beside").
            run["time_ratio"] = run.get("to_beside", run["step_ms"] / run.get("beside_ms", base["step_ms"]))
            least = run.get("beside_ms_min", base["step_ms_min"])
            run["least_time_ratio"] = run["step_ms_min"] / least  # the steadier one on a busy machine
            run["memory_ratio"] = run["memory_bytes"] / base["memory_bytes"]
        if "forward_ms" in run:  # reversing everything cannot cost less than one more forward
            run["floor_ratio"] = 1 + run["forward_ms"] / run["step_ms"]
        if "forward_graph_ms" in run:  # and for its backward that forward needs autograd's graph
            run["floor_graph_ratio"] = 1 + run["forward_graph_ms"] / run["step_ms"]


def measured(run: Run) -> bool:
    return run["task"] == "measure" and run["status"] == "ok"


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / MIB:.2f} MiB" if count < 100 * MIB else f"{count / MIB:.0f} MiB"


def outcome(run: Run) -> str:
    """One run in a few words."""
    if run["status"] != "ok":
        return f"{run['status']}: {run['reason']}"
    if run["task"] == "largest":
        speed = f", {run['tokens_per_second']:.0f} tokens/s" if run["largest"] else ""
        return f"{run['axis']} {run['largest']} in {size(run['budget_bytes'])}{speed}{mark(run)}"
    ratio = f" ({run['time_ratio']:.2f}x)" if "time_ratio" in run else ""
    return f"{run['step_ms']:.1f} ms{ratio}, {size(run['memory_bytes'])}, error {run['gradient_error']:.1e}{mark(run)}"


def mark(run: Run) -> str:
    """What is wrong with its gradients, if anything."""
    if run["wrong"]:
        return " WRONG"
    return f" (linear layers in {' and '.join(run['precisions'])})" if set(run["precisions"]) - {"bfloat16"} else ""


# Tables


def tables(results: dict[str, Any]) -> str:
    """Everything in a result file, as Markdown."""
    machine = results.get("machine") or {}
    head = f"{results['date']}, {machine.get('device')}, torch {machine.get('torch')}, commit {results['commit']}"
    loads = [run["load_before"] for run in results["runs"] if "load_before" in run]
    if loads and machine.get("cpus") and max(loads) > machine["cpus"]:
        head += f"\nBusy with other work too (load up to {max(loads)} on {machine['cpus']} CPUs): mind the times."
    parts = [head]
    for _, runs in grouped(results["runs"], "measure"):
        sizes = runs[0]["configuration"]
        parts.append("{name}: d{width} n{tokens} b{batch}, {blocks} blocks".format(**sizes) + floor(runs))
        columns = ["contender", "step", "to kept", "to floor", "least", "to kept", "memory", "to kept", "error", ""]
        parts.append(table(columns, map(row, runs)))
    for name, runs in grouped(results["runs"], "largest"):
        parts.append(f"{name}: the largest that fits, weights and gradients included")
        parts.append(table(["contender", "axis", "bytes", "largest", "step", "tokens/s"], map(largest_row, runs)))
    return "\n\n".join(parts) + "\n"


def grouped(runs: list[Run], task: str) -> Iterator[tuple[str, list[Run]]]:
    """The runs of each configuration."""
    names = dict.fromkeys(run["configuration"]["name"] for run in runs if run["task"] == task)
    for name in names:
        yield name, [run for run in runs if run["task"] == task and run["configuration"]["name"] == name]


def floor(runs: list[Run]) -> str:
    """What reversing must cost at least, as measured with kept."""
    found = next((run for run in runs if "floor_ratio" in run), None)
    if found is None:
        return ""
    with_graph = f" ({found['floor_graph_ratio']:.2f}x with autograd's graph)" if "floor_graph_ratio" in found else ""
    return f"; kept plus one more forward: {found['floor_ratio']:.2f}x{with_graph}"


def row(run: Run) -> list[str]:
    if run["status"] != "ok":
        return [run["title"], run["status"], *7 * [""], short(run["reason"])]
    median = [f"{run['step_ms']:.1f} ms", ratio(run, "time_ratio"), ratio(run, "to_floor")]
    least = [f"{run['step_ms_min']:.1f} ms", ratio(run, "least_time_ratio")]
    memory = [size(run["memory_bytes"]), ratio(run, "memory_ratio")]
    return [run["title"], *median, *least, *memory, f"{run['gradient_error']:.1e}", mark(run).strip(" ()")]


def largest_row(run: Run) -> list[str]:
    budget = [run["axis"], size(run["budget"])]
    if run["status"] != "ok":
        at_least = f"at least {run['largest']}" if run.get("largest") else ""
        return [run["title"], *budget, at_least, run["status"], short(run["reason"])]
    if not run["largest"]:
        return [run["title"], *budget, "none", "", ""]
    return [run["title"], *budget, str(run["largest"]), f"{run['step_ms']:.1f} ms", f"{run['tokens_per_second']:.0f}"]


def ratio(run: Run, key: str) -> str:
    return f"{run[key]:.2f}x" if key in run else ""


def short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def table(head: list[str], rows: Any) -> str:
    """Aligned Markdown."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


# Plots


def plots(results: dict[str, Any], stem: Path) -> list[Path]:
    """Time against memory for each configuration, memory against depth where depth varies. None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    runs = [run for run in results["runs"] if measured(run)]
    drawn = [time_against_memory(name, group, stem) for name, group in grouped(runs, "measure") if len(group) > 1]
    return drawn + [memory_against_depth(shape, group, stem) for shape, group in depths(runs)]


def time_against_memory(name: str, runs: list[Run], stem: Path) -> Path:
    """One point a contender: down and left is better. The line joins what retrograd offers between reversing
    everything and keeping everything."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 6), dpi=DPI, layout="constrained")
    runs = [run for run in runs if run["contender"] not in UNDRAWN]
    for title, (marker, colour) in KINDS.items():
        if points := [point(run) for run in runs if kind(run) == title]:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=title)
    scale = sorted(point(run) for run in runs if run["contender"] in SCALE)
    if len(scale) > 1:
        axes.plot(*zip(*scale, strict=True), color="tab:green", linewidth=1, zorder=0, label="choose your memory")
    for run in runs:
        if "floor_ratio" in run:
            floor_ms = run["step_ms"] * run["floor_ratio"]
            axes.axhline(floor_ms, color="tab:gray", linewidth=0.7, linestyle=":", label="plain autograd + one forward")
    sizes = "{blocks} blocks of width {width}, {tokens} tokens, batch {batch}".format(**runs[0]["configuration"])
    axes.set(xscale="log", yscale="log", xlabel="peak memory above weights and gradients, MiB", ylabel="step, ms")
    axes.margins(x=0.22, y=0.12)  # room for the names
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set_title(sizes, fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False, handlelength=1.5, columnspacing=1.5)
    add_names(figure, axes, neighbours(runs))
    return saved(figure, stem, f"time-memory-{name}")


def kind(run: Run) -> str:
    """Which of KINDS it is."""
    if run["wrong"]:
        return "wrong gradients"
    return "retrograd" if "retrograd" in run["title"] else "others"


def point(run: Run) -> tuple[float, float]:
    """Where it lies in time against memory."""
    return run["memory_bytes"] / MIB, run["step_ms"]


def neighbours(runs: list[Run]) -> list[list[Run]]:
    """The runs in groups whose points all but coincide."""
    groups: list[list[Run]] = []
    for run in sorted(runs, key=point):
        for group in groups:
            near = group[-1]
            if run["memory_bytes"] < 1.05 * near["memory_bytes"] and 0.98 < run["step_ms"] / near["step_ms"] < 1.02:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def add_names(figure: Any, axes: Any, groups: list[list[Run]]) -> None:
    """Write the names of each group where they cover least, as near to it as can be. Works in pixels."""
    import numpy as np
    from matplotlib.transforms import Bbox, IdentityTransform

    figure.draw_without_rendering()  # settles where the axes lie
    figure.set_layout_engine("none")
    taken: list[Any] = []  # boxes: points, then names too
    inked: list[Any] = []  # positions along lines
    for line in axes.lines:
        path = line.get_transform().transform(line.get_xydata())
        if line.get_marker() == "None":
            inked += [np.linspace(*ends, 300) for ends in pairwise(path)]
        else:
            taken += [Bbox([at - 7, at + 7]) for at in path]
    sides = [(1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)]
    for group in sorted(groups, key=len, reverse=True):
        at = axes.transData.transform(point(group[-1]))
        contenders = [str(run["contender"]) for run in group]
        names = "\n".join(SHORT.get(name, name) for name in contenders)
        text = figure.text(0, 0, names, fontsize=9, va="bottom", transform=IdentityTransform())
        extent = text.get_window_extent().size
        others = [box for box in taken if not box.contains(*at)]
        places: list[tuple[int, Any, Any]] = []
        for gap in (12, 30, 45, 60, 75, 90):
            for side in np.array(sides):
                corner = at + gap * side / np.hypot(*side) + extent * (side - 1) / 2
                box = Bbox([corner, corner + extent])
                leader = np.linspace(at, np.clip(at, box.min, box.max), 50 if gap > 12 else 0)
                covers = 1000 * (4 - axes.bbox.padded(-5).count_contains(box.corners()))
                covers += 100 * box.padded(6).count_overlaps(others) + sum(map(box.padded(3).count_contains, inked))
                covers += 100 * sum(other.count_contains(leader) for other in others)
                places.append((covers, box, leader))
        _, box, leader = min(places, key=lambda place: place[0])  # the nearest of the best
        text.set_position(box.min)
        axes.plot(*leader.T, color="tab:gray", linewidth=0.6, zorder=0, transform=IdentityTransform())
        taken.append(box)
        inked.append(leader)


def depths(runs: list[Run]) -> Iterator[tuple[tuple[int, int, int], list[Run]]]:
    """The runs that differ in depth alone."""
    shapes: dict[tuple[int, int, int], list[Run]] = {}
    for run in runs:
        sizes = run["configuration"]
        shapes.setdefault((sizes["width"], sizes["tokens"], sizes["batch"]), []).append(run)
    for shape, group in shapes.items():
        if len({run["configuration"]["blocks"] for run in group}) > 1:
            yield shape, group


def memory_against_depth(shape: tuple[int, int, int], runs: list[Run], stem: Path) -> Path:
    """One line a contender."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for contender in dict.fromkeys(run["contender"] for run in runs):
        own = [run for run in runs if run["contender"] == contender]
        points = sorted((run["configuration"]["blocks"], run["memory_bytes"] / MIB) for run in own)
        style = "o-" if "retrograd" in own[0]["title"] else "x--"
        axes.plot(*zip(*points, strict=True), style, label=own[0]["title"], linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="blocks", ylabel="peak memory above weights and gradients, MiB")
    plain_ticks(axes.yaxis)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(blocks := sorted({run["configuration"]["blocks"] for run in runs}), list(map(str, blocks)))
    axes.set_title("d{} n{} b{}".format(*shape), fontsize=10)
    axes.legend(fontsize=7)
    return saved(figure, stem, "memory-depth-d{}-n{}-b{}".format(*shape))


def plain_ticks(axis: Any) -> None:
    """Numbers in full at 1, 2 and 5 on a logarithmic axis, or at each digit of a short one."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_data_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 4 * low else range(1, 10)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def saved(figure: Any, stem: Path, what: str) -> Path:
    import matplotlib.pyplot as plt

    path = stem.with_name(f"{stem.name}-{what}.png".replace("/", "-").replace("=", ""))
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        results = json.loads(path.read_text())
        add_ratios(results["runs"])
        print(tables(results))
        for drawn in plots(results, path.with_suffix("")):
            print(f"plot: {drawn}")


if __name__ == "__main__":
    main()
