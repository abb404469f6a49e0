"""Figure 10: what is the global scheduler (placement by KV pressure, migration) worth, for TTFT, TPOT and both?

Eight models on two H100s, the Hyperbolic-like trace. With the global scheduler against without it (each model goes to
the next GPU in turn where it fits and stays), both starting warm. Our own rules against the paper's are in ablation.py.

    python -m benchmarks.sim.fig10 --work DIR [--draws 6] [--seconds 180]
    python -m benchmarks.sim.fig10 --work DIR --draws 6 --write
    python -m benchmarks.sim.fig10 --work DIR --sides "with, whole+with, auto"       # live_scaling.mode

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Final

from benchmarks.sim import harness
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import SMALL_8, catalog, h100_cluster, hyperbolic, requests
from prism.core.settings import LiveMode, PolicySettings
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate

RATES = (16.0, 32.0, 64.0)
SIDES: Final[dict[str, dict[str, object]]] = {
    "with": {},
    "without": {"global_scheduler": False},
    **{f"with, {mode.value}": {"live": mode} for mode in LiveMode},
}
"""What each changes of the settings; the first two are compared if no others are named."""


def run(rate: float, draw: int, seconds: float, side: str) -> dict[str, Any]:
    plain = catalog(SMALL_8)
    rows = requests(hyperbolic(rate, seconds).spec, plain, draw)
    models = with_objectives(plain, dedicated_objectives(plain, rows, h100_cluster(1)), 5.0, 2.0)
    base = PolicySettings.named("prism")
    policy = replace(base, cluster=replace(base.cluster, **SIDES[side]))  # type: ignore[arg-type]
    result = simulate(SimSpec(h100_cluster(2), models, policy, lambda: rows, preload_share=1.0))
    group = result.report.all
    met = group.attainment
    return {
        "both": met.both,
        "ttft": met.ttft,
        "tpot": met.tpot,
        "p99_s": group.ttft_s.at(99.0) if group.ttft_s else 0.0,
        "activations": result.stats.activations,
        "never_ended": result.stats.never_ended,
    }


def name_of(rate: float, draw: int, side: str) -> str:
    return f"fig10 {rate:g} {draw} {side}"


def table(pieces: Pieces, draws: tuple[int, ...], sides: tuple[str, ...]) -> None:
    """Goodput (TTFT / TPOT) by draw, and the means over draws with all sides."""
    heads = [f"{rate:g}/s {side}" for rate in RATES for side in sides]
    print("| draw | " + " | ".join(heads) + " |\n" + "|---" * (1 + len(heads)) + "|")
    sums: dict[str, list[tuple[float, float, float]]] = {head: [] for head in heads}
    for draw in draws:
        cells = []
        for rate in RATES:
            both = {side: pieces.get(name_of(rate, draw, side)) for side in sides}
            for side, piece in both.items():
                if piece is None or None in both.values():
                    cells.append("-")
                    continue
                shares = piece["both"], piece["ttft"], piece["tpot"]
                sums[f"{rate:g}/s {side}"].append(shares)
                cells.append(_cell(shares))
        print(f"| {draw} | " + " | ".join(cells) + " |")
    means = [_cell(tuple(map(fmean, zip(*found, strict=True)))) if found else "-" for found in sums.values()]
    print("| mean | " + " | ".join(means) + " |")


def _cell(shares: tuple[float, ...]) -> str:
    both, ttft, tpot = shares
    return f"{both:.3f} ({ttft:.3f} / {tpot:.3f})"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--sides", default="with+without", help=f"separated by +; of {', '.join(map(repr, SIDES))}")
    args = parser.parse_args()
    pieces, draws, sides = Pieces(args.work), harness.chosen_draws(args), tuple(args.sides.split("+"))
    if not args.write:
        wanted = (
            (name_of(rate, draw, side), partial(run, rate, draw, args.seconds, side))
            for draw in draws
            for rate in RATES
            for side in sides
        )
        harness.make(args, pieces, wanted)
    table(pieces, draws, sides)


if __name__ == "__main__":
    main()
