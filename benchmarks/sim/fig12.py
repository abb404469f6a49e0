"""Figure 12: how many H100s do 58 models need under each policy?

58 models, 1B to 70B (``workloads.MIX_58``; the paper's own list is not in the copy at hand), 8 to 32 GPUs, 90 s of
the Hyperbolic-like trace at 60 requests/s. Goodput, TTFT and TPOT over the number of GPUs at TTFT scale 5, TPOT scale
2, and GPUs for 99% of each draw. Everybody starts warm. "ideal" is what the same GPUs could do (``ideal.py``).

    python -m benchmarks.sim.fig12 --work DIR [--draws 3] [--gpus 8,12,16,20,24,32]
    python -m benchmarks.sim.fig12 --work DIR --write
    python -m benchmarks.sim.fig12 --work DIR --policies "prism, whole+prism, auto"        # live_scaling.mode

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any

from benchmarks.sim import fleet_tables, harness, variants
from benchmarks.sim.ideal import IDEAL, ideal
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.plots import OUT, Panel, band, panels
from benchmarks.sim.workloads import MIX_58, catalog, h100_cluster, hyperbolic, requests
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.trace.row import TraceRow


@lru_cache(maxsize=1)
def workload(pieces: Pieces, draw: int, seconds: float, rate: float) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The models with their objectives, and the requests, of a draw."""
    plain = catalog(MIX_58)
    rows = requests(hyperbolic(rate, seconds).spec, plain, draw)
    name = f"objectives fig12 {draw} {seconds:g} {rate:g}"
    base = pieces.kept(name, lambda: dict(dedicated_objectives(plain, rows, h100_cluster(8))))
    return with_objectives(plain, {key: (value[0], value[1]) for key, value in base.items()}, 5.0, 2.0), rows


def run(pieces: Pieces, draw: int, policy: str, gpus: int, seconds: float, rate: float) -> dict[str, Any]:
    models, rows = workload(pieces, draw, seconds, rate)
    if policy == IDEAL:
        share = ideal(h100_cluster(gpus), models, rows)
        return {"both": share, "ttft": share, "tpot": share, "never_ended": 0}
    result = variants.run(policy, h100_cluster(gpus), models, rows)
    met = result.report.all.attainment
    return {"both": met.both, "ttft": met.ttft, "tpot": met.tpot, "never_ended": result.stats.never_ended}


def name_of(draw: int, policy: str, gpus: int) -> str:
    return f"fig12 {draw} {policy} {gpus}"


def write(pieces: Pieces, draws: tuple[int, ...], policies: tuple[str, ...], fleets: tuple[int, ...]) -> None:
    """The tables, the raw numbers and the plot."""
    found = fleet_tables.finished(pieces, name_of, draws, policies, fleets)
    fleet_tables.print_tables(found, fleets)
    raw = {policy: {str(draw): done for draw, done in runs.items()} for policy, runs in found.items()}
    cells = [
        Panel(title, "GPUs", {policy: band(fleet_tables.curves(found[policy], metric, fleets)) for policy in found})
        for metric, title in fleet_tables.METRICS.items()
    ]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "fig12.json").write_text(json.dumps({"gpus": fleets, "policies": raw}, indent=0) + "\n", "utf-8")
    print(panels("fig12", [cells], "58 models (simulated H100s)"))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--gpus", default="8,12,16,20,24,32")
    parser.add_argument("--policies", default="+".join((*variants.POLICIES, IDEAL)), help=variants.HELP)
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    fleets, policies = tuple(map(int, args.gpus.split(","))), tuple(args.policies.split("+"))
    if not args.write:
        wanted = (
            (name_of(draw, policy, gpus), partial(run, pieces, draw, policy, gpus, args.seconds, args.rate))
            for draw in draws
            for gpus in fleets
            for policy in policies
        )
        harness.make(args, pieces, wanted)
        return
    write(pieces, draws, policies, fleets)


if __name__ == "__main__":
    main()
