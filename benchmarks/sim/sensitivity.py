"""How much do the results hang on what is assumed of the modelled GPU?

Eight models of 7B and 8B on two H100s (figure 7's memory-bound set-up) at two rates, Prism and ``muxserve``, with one
assumption changed at a time to a value that public figures leave possible (docs/sim.md). Objectives are found anew
under each assumption, as whoever measures them on such a GPU would find them.

    python -m benchmarks.sim.sensitivity --work DIR [--draws 2]
    python -m benchmarks.sim.sensitivity --work DIR --draws 2 --write

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.sim import harness, variants
from benchmarks.sim.fig7_runs import TRACES
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import SETUPS, scaled
from prism.sim.objectives import dedicated_objectives, with_objectives

SETUP = SETUPS["memory-bound"]
RATES = (1.0, 2.0)
WHO = (variants.PRISM, "muxserve")
RATES_OF: dict[str, dict[str, float]] = {
    "as modelled": {},
    "prefill at 0.45 of the peak": {"compute_efficiency": 0.45},
    "prefill at 0.65": {"compute_efficiency": 0.65},
    "KV read at 0.55 of the bandwidth": {"kv_efficiency": 0.55},
    "KV read at 0.8": {"kv_efficiency": 0.8},
    "weights read at 0.7": {"memory_efficiency": 0.7},
    "a step's overhead 1 ms": {"step_overhead_s": 0.001},
    "a step's overhead 5 ms": {"step_overhead_s": 0.005},
    "an engine takes no memory": {"process_bytes": 0.0, "parked_bytes": 0.0},
    "an engine takes 2 GB": {"process_bytes": 2e9, "parked_bytes": 1e9},
}
TIMINGS: dict[str, dict[str, str]] = {
    "activation 0.2 s + loading": {"relayout": "0.12s", "ready": "0.08s"},
    "activation 1.5 s": {"relayout": "1.3s", "ready": "0.2s"},
}


def run(who: str, assumed: str, trace: str, draw: int, rate: float, seconds: float) -> dict[str, Any]:
    rates, timing = RATES_OF.get(assumed, {}), TIMINGS.get(assumed, {})
    rows, plain = SETUP.base_rows(TRACES[trace](SETUP.base_rps, seconds), draw), SETUP.models()
    one = SETUP.cluster(1, rates=rates, timing=timing)
    models = with_objectives(plain, dedicated_objectives(plain, rows, one), 5.0, 2.0)
    more = scaled(rows, rate / SETUP.base_rps, draw)
    met = variants.run(who, SETUP.cluster(2, rates=rates, timing=timing), models, more).report.all.attainment
    return {"both": met.both, "ttft": met.ttft, "tpot": met.tpot}


def name_of(who: str, assumed: str, trace: str, draw: int, rate: float) -> str:
    return f"sensitivity {assumed} {trace} {draw} {rate:g} {who}"


def table(pieces: Pieces, draws: tuple[int, ...]) -> None:
    """Goodput, means over traces and draws that every cell has."""
    heads = [f"{rate:g}/s {who}" for rate in RATES for who in WHO]
    print("| assumed | " + " | ".join(heads) + " |\n" + "|---" * (1 + len(heads)) + "|")
    every = (*RATES_OF, *TIMINGS)
    whole = [
        (trace, draw)
        for draw in draws
        for trace in TRACES
        if all(pieces.get(name_of(who, a, trace, draw, rate)) for a in every for who in WHO for rate in RATES)
    ]
    for assumed in every if whole else ():
        cells = []
        for rate in RATES:
            for who in WHO:
                found = [pieces.get(name_of(who, assumed, trace, draw, rate)) or {} for trace, draw in whole]
                cells.append(f"{fmean(piece['both'] for piece in found):.3f}")
        print(f"| {assumed} | " + " | ".join(cells) + " |")
    print(f"over {', '.join(f'{trace}-like {draw}' for trace, draw in whole)}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    if not args.write:
        wanted = (
            (name_of(who, a, trace, draw, rate), partial(run, who, a, trace, draw, rate, args.seconds))
            for draw in draws
            for trace in TRACES
            for a in (*RATES_OF, *TIMINGS)
            for rate in RATES
            for who in WHO
        )
        harness.make(args, pieces, wanted)
        return
    table(pieces, draws)


if __name__ == "__main__":
    main()
