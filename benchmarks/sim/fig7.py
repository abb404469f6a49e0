"""Figure 7: how do attainments of Prism and its rivals change with request rate, objectives and number of GPUs?

Two traces (Hyperbolic-like and Arena-like, generated), policies over the same modelled H100s. Rows:

- ``rate``: 8 models on 2 GPUs. One base trace is scaled to every rate and keeps its pattern over time; objectives are
  those of the base trace. Three set-ups (``workloads.SETUPS``). ``free memory`` shows what is left to miss when memory
  never binds;
- ``slo``: 8 models on 2 GPUs over SLO scales, at 40 requests/s;
- ``gpus``: 18 models on 2 to 8 GPUs, at 40 requests/s.

Objectives: P95 of each model alone on a GPU, times the scale (TTFT 5, TPOT 2 unless swept). Medians of several draws.

    python -m benchmarks.sim.fig7 [--row rate] [--setup prototype] [--draws 3] [--seconds 150] [--processes 2]
    python -m benchmarks.sim.fig7 --row gpus --points 5 --policies prism --draws 1      # one point in seconds
    python -m benchmarks.sim.fig7 --plot                                    # from docs/results/sim/fig7.json

Everything takes about half an hour of one core. With ``--points`` or ``--policies`` nothing is written (but see
``--write``); otherwise the lines that were run replace those in docs/results/sim/fig7.json, and the figure is drawn
from it.

The last result and what to think of it is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.sim.falling import falls_at, spread
from benchmarks.sim.fig7_runs import FREE, LABELS, POLICIES, TRACES, XS, Found, Line, Task, run_task
from benchmarks.sim.plots import OUT, Panel, band, crossing, panels, show
from benchmarks.sim.workloads import SETUPS

TARGETS = (0.99, 0.95, 0.9)
STORE = OUT / "fig7.json"
Lines = dict[Line, list[Found]]


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    """What the command line asks for, smallest first."""
    policies = tuple(args.policies.split(",")) if args.policies else None
    points = tuple(map(float, args.points.split(","))) if args.points else None
    for row in args.row.split(","):
        setups = args.setup.split(",") if row == "rate" else [""]
        for setup in setups:
            for draw in range(args.first, args.draws + 1):
                for trace in args.trace.split(","):
                    chosen = policies or (POLICIES + ((FREE,) if row == "rate" else ()))
                    xs = points or XS[row] or SETUPS[setup].rates
                    yield Task(row, setup, trace, draw, chosen, xs, args.seconds)


def run(args: argparse.Namespace) -> Lines:
    """All lines, printed as they come."""
    found: Lines = {}
    wanted = list(tasks(args))
    if args.processes < 2:
        results = map(run_task, wanted)
        return {line: points for lines in results for line, points in told(lines)}
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for lines in pool.imap_unordered(run_task, wanted):
            found.update(told(lines))
    return found


def told(lines: list[tuple[Line, list[Found]]]) -> list[tuple[Line, list[Found]]]:
    for line, points in lines:
        text = "  ".join(f"{p.x:g}: {p.ttft:.3f}/{p.tpot:.3f}" for p in points)
        print(
            f"{line.row} {line.setup or '-'} {line.trace} draw {line.draw} {line.policy:11s} TTFT/TPOT met  {text}",
            flush=True,
        )
    return lines


def stored(path: Path) -> Lines:
    """The lines in ``path``, if it exists."""
    if not path.exists():
        return {}
    return {
        Line(**{k: v for k, v in entry.items() if k != "points"}): [Found(*point) for point in entry["points"]]
        for entry in json.loads(path.read_text("utf-8"))
    }


def store(path: Path, lines: Lines) -> None:
    """Write ``lines``, one to a text line."""
    entries = [
        {**asdict(line), "points": [[p.x, round(p.ttft, 5), round(p.tpot, 5)] for p in points]}
        for line, points in sorted(lines.items(), key=lambda item: tuple(asdict(item[0]).values()))
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", "utf-8")


def group(lines: Lines, row: str, setup: str, trace: str, metric: str) -> dict[str, list[list[tuple[float, float]]]]:
    """Policy -> one curve for each draw."""
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for line, points in lines.items():
        if (line.row, line.setup, line.trace) == (row, setup, trace):
            curves.setdefault(line.policy, []).append([(p.x, getattr(p, metric)) for p in points])
    return {p: curves[p] for p in (*POLICIES, FREE) if p in curves}


def draw(lines: Lines) -> None:
    """The figure, and for the rate row the table of rates."""
    grid = []
    order = {name: i for i, name in enumerate((*XS, *SETUPS))}
    keys = dict.fromkeys((line.row, line.setup) for line in lines)
    for row, setup in sorted(keys, key=lambda key: (order[key[0]], order.get(key[1], 0))):
        cells = []
        for trace in TRACES:
            for metric in ("ttft", "tpot"):
                curves = group(lines, row, setup, trace, metric)
                title = f"{setup + ', ' if setup else ''}{trace}-like, {metric.upper()}"
                cells.append(Panel(title, LABELS[row], {p: band(c) for p, c in curves.items()}, row == "rate"))
                if row != "rate":
                    least(f"{row}, {trace}-like, {metric.upper()}", curves)
        grid.append(cells)
    for metric in ("ttft", "tpot"):
        rates(lines, metric)
    print(panels("fig7", grid, "Attainment over rate, objectives and GPUs (simulated H100s)"))


def rates(lines: Lines, metric: str) -> None:
    """Rates at the targets: median and range over draws, and Prism's over each rival's, draw by draw."""
    shown = ("prism", "muxserve", "static", FREE)
    print(f"\n| {metric.upper()} | met | " + " | ".join((*shown, *(f"prism / {rival}" for rival in shown[1:]))) + " |")
    print("|---" * (2 + 2 * len(shown) - 1) + "|")
    for setup in SETUPS:
        for trace in TRACES:
            curves = group(lines, "rate", setup, trace, metric)
            for target in TARGETS if set(shown) <= set(curves) else ():
                at = {p: [falls_at(curve, target) for curve in curves[p]] for p in shown}
                over = [[a.over(b) for a, b in zip(at["prism"], at[p], strict=True)] for p in shown[1:]]
                cells = [spread(found) for found in (*at.values(), *over)]
                print(f"| {setup}, {trace}-like | {target:.0%} | " + " | ".join(cells) + " |")


def least(title: str, curves: dict[str, list[list[tuple[float, float]]]]) -> None:
    """The median curves, and from which x on each is at 99%."""
    print(f"\n{title}")
    for policy, draws in curves.items():
        points = [(x, mid) for x, _, mid, _ in band(draws)]
        ends = [show(crossing(c)) for c in draws]
        text = " ".join(f"{x:g}:{y:.3f}" for x, y in points)
        print(f"  {policy:11s} {text}  99% from {show(crossing(points))} (draws: {', '.join(ends)})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", default=",".join(XS))
    parser.add_argument("--setup", default=",".join(SETUPS), help="of the rate row")
    parser.add_argument("--trace", default=",".join(TRACES))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="draw to begin with")
    parser.add_argument("--policies", default="", help="only these, and write nothing")
    parser.add_argument("--write", action="store_true", help="even with --policies")
    parser.add_argument("--points", default="", help="only these x, and write nothing")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--plot", action="store_true", help="run nothing")
    args = parser.parse_args()
    found = {} if args.plot else run(args)
    if args.points or (args.policies and not args.write):
        return
    lines = stored(STORE) | found
    store(STORE, lines)
    draw(lines)


if __name__ == "__main__":
    main()
