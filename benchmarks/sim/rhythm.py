"""What does loading models before they are asked bring, where requests have a rhythm?

58 models (``workloads.MIX_58``), each asked one to four times every 40 to 240 s (its period, give or take a twentieth),
for 20 minutes; ten of them are asked after another one, as by a program that needs both. 4, 6 and 8 H100s: not half of
them fit. Prism with and without ``prewarm``, and ``serverlessllm``. The same requests and objectives for all (P95
alone; TTFT x5, TPOT x2); everybody starts warm.

    python -m benchmarks.sim.rhythm --work DIR [--draws 3] [--gpus 4,6,8]

The last result is in docs/results/scheduler.md.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, Final

from benchmarks.sim import harness, variants
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import MIX_58, arena, catalog, h100_cluster, requests
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate
from prism.trace.row import TraceRow

WITHOUT: Final = "prism, nothing loaded ahead"
WHO: Final = (variants.PRISM, WITHOUT, "serverlessllm")
SECONDS: Final = 1200.0
_PERIOD_S: Final = (40.0, 240.0)
_FOLLOWS_S: Final = (3.0, 8.0)
_PAIRS: Final = 10
"""So many models have a companion, which has no rhythm of its own."""


def rhythmic(models: tuple[ModelSpec, ...], draw: int) -> list[TraceRow]:
    """The requests of one draw; lengths are those of the Arena-like trace."""
    rng = random.Random(draw)
    lengths = requests(arena(4.0, SECONDS).spec, models, draw)
    rows: list[TraceRow] = []

    def ask(model: ModelSpec, at_s: float) -> None:
        times_s = [at_s + 0.3 * again for again in range(rng.randint(1, 4))]
        rows.extend(replace(rng.choice(lengths), model=str(model.name), arrival_s=time_s) for time_s in times_s)

    led, alone = models[:_PAIRS], models[_PAIRS:]
    followers = dict(zip(alone, led, strict=False))
    for model in alone:
        period_s = rng.uniform(*_PERIOD_S)
        at_s = rng.uniform(0.0, period_s)
        while at_s < SECONDS:
            ask(model, at_s)
            if model in followers:
                ask(followers[model], at_s + rng.uniform(*_FOLLOWS_S))
            at_s += period_s * rng.uniform(0.95, 1.05)
    return sorted((row for row in rows if row.arrival_s < SECONDS), key=lambda row: row.arrival_s)


@lru_cache(maxsize=1)
def workload(pieces: Pieces, draw: int) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The models with their objectives, and the requests, of a draw."""
    plain = catalog(MIX_58)
    rows = rhythmic(plain, draw)
    base = pieces.kept(f"objectives rhythm {draw}", lambda: dict(dedicated_objectives(plain, rows, h100_cluster(8))))
    return with_objectives(plain, {key: (value[0], value[1]) for key, value in base.items()}, 5.0, 2.0), rows


def settings_of(who: str, rows: list[TraceRow]) -> PolicySettings:
    found = variants.settings(variants.PRISM if who == WITHOUT else who, rows)
    return replace(found, cluster=replace(found.cluster, prewarm=who != WITHOUT))


def run(pieces: Pieces, draw: int, who: str, gpus: int) -> dict[str, Any]:
    models, rows = workload(pieces, draw)
    result = simulate(SimSpec(h100_cluster(gpus), models, settings_of(who, rows), lambda: rows, preload_share=1.0))
    group, decisions = result.report.all, result.stats.decisions
    return {
        "requests": len(rows),
        "both": group.attainment.both,
        "ttft": group.attainment.ttft,
        "p99_s": group.ttft_s.at(99.0) if group.ttft_s else 0.0,
        "activations": result.stats.activations,
        "ahead": decisions.get("Activate:prewarm", 0),
        "never_ended": result.stats.never_ended,
    }


def show(pieces: Pieces, draws: tuple[int, ...], fleets: tuple[int, ...]) -> None:
    """Medians over the draws that are complete."""
    print(
        "\n| goodput (P99 of first tokens; activations, of them ahead), GPUs | " + " | ".join(map(str, fleets)) + " |"
    )
    print("|---" * (1 + len(fleets)) + "|")
    for who in WHO:
        cells = []
        for gpus in fleets:
            found = [p for d in draws if (p := pieces.get(name_of(d, who, gpus))) is not None]
            if not found:
                cells.append("")
                continue
            mid = {key: median(one[key] for one in found) for key in found[0]}
            cells.append(f"{mid['both']:.3f} ({mid['p99_s']:.1f} s; {mid['activations']:.0f}, {mid['ahead']:.0f})")
        print(f"| {who} | " + " | ".join(cells) + " |")


def name_of(draw: int, who: str, gpus: int) -> str:
    return f"rhythm {draw} {who} {gpus}"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--gpus", default="4,6,8")
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    fleets = tuple(map(int, args.gpus.split(",")))
    wanted = [(d, who, gpus) for d in draws for gpus in fleets for who in WHO]
    harness.make(args, pieces, [(name_of(*one), partial(run, pieces, *one)) for one in wanted])
    show(pieces, draws, fleets)


if __name__ == "__main__":
    main()
