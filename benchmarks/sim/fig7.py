"""Figure 7: how do goodput and attainments of Prism and its rivals change with request rate, objectives and GPUs?

Two traces (Hyperbolic-like and Arena-like, generated), policies over the same modelled H100s. Rows:

- ``rate``: 8 models on 2 GPUs. One base trace is scaled to every rate and keeps its pattern over time; objectives are
  those of the base trace. Three set-ups (``workloads.SETUPS``). ``free memory`` shows what is left to miss when memory
  never binds, ``ideal`` (also of the other rows) what the GPUs could do (``ideal.py``);
- ``slo``: 8 models on 2 GPUs over SLO scales, at 40 requests/s;
- ``gpus``: 18 models on 2 to 8 GPUs, at 40 requests/s.

Objectives: P95 of each model alone on a GPU, times the scale (TTFT 5, TPOT 2 unless swept). Everybody starts warm.
Draws are those of one split (``splits.py``): results are judged on draws that nothing was tuned on.

    python -m benchmarks.sim.fig7 --work DIR [--row rate] [--setup prototype] [--draws 3]     # several may run at once
    python -m benchmarks.sim.fig7 --work DIR --write                       # tables and figure of what is done
    python -m benchmarks.sim.fig7 --work DIR --set tuning --row gpus --points 5 --policies prism --draws 1

The last result and what to think of it is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median

from benchmarks.sim import harness, variants
from benchmarks.sim.falling import Rate, falls_at, spread
from benchmarks.sim.fig7_runs import FREE, LABELS, TRACES, XS, Bench, Found, Line
from benchmarks.sim.ideal import IDEAL
from benchmarks.sim.pieces import Pieces, Work
from benchmarks.sim.plots import OUT, Panel, band, crossing, panels, show
from benchmarks.sim.workloads import SETUPS

TARGETS = (0.99, 0.9)
METRICS = {"both": "goodput", "ttft": "TTFT"}
"""What the tables are made of: the figure of merit, and the papers' row."""
Lines = dict[Line, list[Found]]
Curve = list[tuple[float, float]]


def lines(args: argparse.Namespace) -> Iterator[Line]:
    """What the command line asks for: draw after draw, so that what is done at any time covers everything."""
    policies = tuple(args.policies.split("+")) if args.policies else variants.POLICIES
    for draw in harness.chosen_draws(args):
        for row in args.row.split(","):
            for setup in args.setup.split(",") if row == "rate" else [""]:
                for trace in args.trace.split(","):
                    free = (FREE,) if row == "rate" else ()
                    more = () if args.policies else (*free, IDEAL)
                    yield from (Line(row, setup, trace, draw, policy) for policy in (*policies, *more))


def done(pieces: Pieces, wanted: Sequence[Line]) -> Lines:
    """Those that are there."""
    found = {line: pieces.get(line.name) for line in wanted}
    return {line: [Found(**p) for p in piece["points"]] for line, piece in found.items() if piece is not None}


def told(found: Lines) -> None:
    for line, points in found.items():
        text = "  ".join(f"{p.x:g}: {p.both:.3f} ({p.ttft:.3f}/{p.tpot:.3f})" for p in points)
        print(f"{line.row} {line.setup or '-'} {line.trace} {line.draw} {line.policy:21s} both (TTFT/TPOT)  {text}")


def curves(found: Lines, row: str, setup: str, trace: str, metric: str) -> dict[str, dict[int, Curve]]:
    """Policy -> draw -> curve."""
    result: dict[str, dict[int, Curve]] = {}
    for line, points in found.items():
        if (line.row, line.setup, line.trace) == (row, setup, trace):
            result.setdefault(line.policy, {})[line.draw] = [(p.x, getattr(p, metric)) for p in points]
    return {policy: result[policy] for policy in (*variants.POLICIES, FREE, IDEAL) if policy in result}


def rates(found: Lines, metric: str) -> None:
    """Rates at the targets: median and range over draws, and Prism's over the best rival's, draw by draw; of those
    policies that were run."""
    policies = {line.policy for line in found if line.row == "rate"}
    who: list[str] = [p for p in (*variants.POLICIES, FREE, IDEAL) if p in policies]
    rivals = [p for p in variants.RIVALS if p in policies]
    if not rivals:
        return
    over = [(p, "best rival") for p in (variants.PRISM, variants.UNTOLD, IDEAL) if p in policies]
    over += [(variants.PRISM, p) for p in (FREE, IDEAL) if {p, variants.PRISM} <= policies]
    heads = [*who, *(f"{a} / {b}" for a, b in over)]
    print(f"\n| {METRICS[metric]} | met | draws | " + " | ".join(heads) + " |")
    print("|---" * (3 + len(heads)) + "|")
    for setup in SETUPS:
        for trace in TRACES:
            by_policy = curves(found, "rate", setup, trace, metric)
            common = set.intersection(*map(set, by_policy.values())) if set(who) <= set(by_policy) else set()
            for target in TARGETS if common else ():
                at = {p: [falls_at(by_policy[p][draw], target) for draw in sorted(common)] for p in who}
                at["best rival"] = [max(o, key=_size) for o in zip(*(at[p] for p in rivals), strict=True)]
                ratios = [[x.over(y) for x, y in zip(at[a], at[b], strict=True)] for a, b in over]
                cells = [str(len(common)), *(spread(values) for values in (*(at[p] for p in who), *ratios))]
                print(f"| {setup}, {trace}-like | {target:.0%} | " + " | ".join(cells) + " |")


def _size(rate: Rate) -> tuple[float, int]:
    return rate.value, rate.side


def least(found: Lines, row: str, metric: str) -> None:
    """Median shares over draws at each x, and from which x on each draw is at 99%."""
    for trace in TRACES:
        by_policy = curves(found, row, "", trace, metric)
        if not by_policy:
            continue
        xs = sorted({x for by_draw in by_policy.values() for curve in by_draw.values() for x, _ in curve})
        heads = [f"{trace}-like, {METRICS[metric]}, {LABELS[row]}", *(f"{x:g}" for x in xs), "99% from"]
        print("\n| " + " | ".join(heads) + " |")
        print("|---" * (len(xs) + 2) + "|")
        for policy, by_draw in by_policy.items():
            shares = [median(dict(curve).get(x, 0.0) for curve in by_draw.values()) for x in xs]
            ends = ", ".join(show(crossing(curve)) for curve in by_draw.values())
            print(f"| {policy} | " + " | ".join(f"{share:.3f}" for share in shares) + f" | {ends} |")


def never_ended(found: Lines) -> None:
    """How many requests of each policy never ended, over all runs."""
    sums: dict[str, int] = {}
    for line, points in found.items():
        sums[line.policy] = sums.get(line.policy, 0) + sum(p.never_ended for p in points)
    print("\nnever ended, over all points: " + ", ".join(f"{policy} {count}" for policy, count in sums.items()))


def draw_figure(found: Lines) -> None:
    grid = []
    for row, setups in (("rate", tuple(SETUPS)), ("slo", ("",)), ("gpus", ("",))):
        for setup in setups:
            cells = []
            for trace in TRACES:
                for metric, title in METRICS.items():
                    by_policy = curves(found, row, setup, trace, metric)
                    bands = {p: band(list(by_draw.values())) for p, by_draw in by_policy.items()}
                    heading = f"{setup + ', ' if setup else ''}{trace}-like, {title}"
                    cells.append(Panel(heading, LABELS[row], bands, row == "rate"))
            if all(cell.bands for cell in cells):
                grid.append(cells)
    if grid:
        print(panels("fig7", grid, "Goodput and TTFT attainment over rate, objectives and GPUs (simulated H100s)"))


def write(found: Lines) -> None:
    """The raw numbers, the tables and the figure."""
    entries = [{**asdict(line), "points": [list(asdict(p).values()) for p in points]} for line, points in found.items()]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "fig7.json").write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", "utf-8")
    for metric in METRICS:
        rates(found, metric)
        least(found, "gpus", metric)
        least(found, "slo", metric)
    never_ended(found)
    draw_figure(found)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--row", default=",".join(XS))
    parser.add_argument("--setup", default=",".join(SETUPS), help="of the rate row")
    parser.add_argument("--trace", default=",".join(TRACES))
    parser.add_argument("--policies", default="", help=f"only these: {variants.HELP}")
    parser.add_argument("--points", default="", help="only these x")
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    pieces = Pieces(args.work)
    bench = Bench(pieces, tuple(map(float, args.points.split(","))) if args.points else (), args.seconds)
    wanted = list(lines(args))
    if not args.write:
        tasks: Iterator[tuple[str, Work]] = ((line.name, partial(bench.run, line)) for line in wanted)
        harness.make(args, pieces, tasks)
    found = done(pieces, wanted)
    told(found)
    if args.write:
        write(found)


if __name__ == "__main__":
    main()
