"""How many H100s do two hundred models need, most of which nobody asks at a time?

201 models of 1B to 70B (:data:`MIX_200`, 3.5 TB of weights), popularity falling with rank (Zipf); each is asked in
bursts, five times its mean for 20 s and then nothing for 80 s, on average, so that about forty are asked within ten
seconds; 20 requests/s together for five minutes, with the lengths of the Arena-like trace. First tokens within 2 s and
50 ms a token for all: who loads on demand can keep these. Everybody starts warm, with as many models as fit, and is
told the trace's means. Goodput, TTFT and TPOT over the number of GPUs; all weights together fill 44.

    python -m benchmarks.sim.long_tail --work DIR [--draws 3] [--gpus 4,8,12,16,24,32,48,64]

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

from benchmarks.sim import fleet_tables, harness, variants
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import MIX_58, arena, catalog, h100_cluster, requests
from prism.core.specs import ModelSpec
from prism.trace.row import TraceRow

MIX_200: Final = tuple((path, round(count * 200 / 58), tp) for path, count, tp in MIX_58)
TTFT_S, TPOT_S = 2.0, 0.05
SECONDS, RATE_RPS = 300.0, 20.0
_ON_S, _OFF_S = 20.0, 80.0


@lru_cache(maxsize=1)
def workload(draw: int) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The models, and the requests of a draw, which says who is popular as well."""
    models, rng = catalog(MIX_200, TTFT_S, TPOT_S), random.Random(draw)
    lengths = requests(arena(4.0, SECONDS).spec, models, draw)
    ranked = rng.sample(models, len(models))
    weights = [1.0 / rank for rank in range(1, len(ranked) + 1)]
    rows: list[TraceRow] = []
    for model, weight in zip(ranked, weights, strict=True):
        burst_rps = RATE_RPS * weight / sum(weights) * (_ON_S + _OFF_S) / _ON_S
        at_s = -rng.uniform(0.0, _ON_S + _OFF_S)
        while at_s < SECONDS:
            begins_s = at_s + rng.expovariate(1.0 / _OFF_S)
            ends_s = begins_s + rng.expovariate(1.0 / _ON_S)
            at_s = begins_s
            while (at_s := at_s + rng.expovariate(burst_rps)) < ends_s:
                rows.append(replace(rng.choice(lengths), model=str(model.name), arrival_s=at_s))
            at_s = ends_s
    return models, sorted((row for row in rows if 0.0 <= row.arrival_s < SECONDS), key=lambda row: row.arrival_s)


def run(draw: int, policy: str, gpus: int) -> dict[str, Any]:
    models, rows = workload(draw)
    result = variants.run(policy, h100_cluster(gpus), models, rows)
    met = result.report.all.attainment
    return {
        "requests": len(rows),
        "both": met.both,
        "ttft": met.ttft,
        "tpot": met.tpot,
        "never_ended": result.stats.never_ended,
        "activations": result.stats.activations,
    }


def name_of(draw: int, policy: str, gpus: int) -> str:
    return f"long tail {draw} {policy} {gpus}"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--gpus", default="4,8,12,16,24,32,48,64")
    parser.add_argument("--policies", default="+".join((variants.PRISM, *variants.RIVALS)), help=variants.HELP)
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    fleets, policies = tuple(map(int, args.gpus.split(","))), tuple(args.policies.split("+"))
    wanted = [(draw, policy, gpus) for draw in draws for gpus in fleets for policy in policies]
    harness.make(args, pieces, [(name_of(*one), partial(run, *one)) for one in wanted])
    fleet_tables.print_tables(fleet_tables.finished(pieces, name_of, draws, policies, fleets), fleets)


if __name__ == "__main__":
    main()
