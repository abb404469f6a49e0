"""How many H100s do thirty models need whose requests come from several recorded sources at once?

A catalog as a provider has it: chats, code and long documents beside each other. Of each draw (its seed) thirty models,
1B to 70B, get one stream each of public traces: Chatbot Arena (many models, most of them idle), ServeGen (clients with
bursts of their own), Azure's conversations (two steady streams) and Mooncake's (prompts of 12,000 tokens in the mean,
with their common prefixes), each from a moment drawn by the seed. Which stream falls to which model is drawn, too, but
that Mooncake's goes to one with a context of 128k tokens. Objectives and policies are those of figure 12
(``fig12.py``). The traces are not part of this repository: ``--traces`` names a folder with
``arena_vtc_27m.parquet``, ``semisynth_servegen_multi_2h.parquet``, ``azure2023_conv.parquet`` and
``mooncake_conversation.parquet`` (``prism trace convert`` makes them of the public originals).

    python -m benchmarks.sim.composite --traces DIR --work DIR [--draws 3] [--gpus 4,6,8,12,16]
    python -m benchmarks.sim.composite --traces DIR --work DIR --write

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from benchmarks.sim import fleet_tables, harness, variants
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import Mix, catalog, h100_cluster
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.trace.files import open_trace
from prism.trace.row import TraceRow

MIX: Final[Mix] = (
    ("meta-llama/Llama-3.2-1B-Instruct", 4, 1),
    ("meta-llama/Llama-3.2-3B-Instruct", 4, 1),
    ("Qwen/Qwen2.5-1.5B-Instruct", 2, 1),
    ("Qwen/Qwen2.5-3B-Instruct", 2, 1),
    ("Qwen/Qwen3-4B", 2, 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", 2, 1),
    ("Qwen/Qwen2.5-7B-Instruct", 3, 1),
    ("meta-llama/Llama-3.1-8B-Instruct", 6, 1),
    ("google/gemma-2-9b-it", 1, 1),
    ("Qwen/Qwen2.5-14B-Instruct", 2, 1),
    ("Qwen/Qwen2.5-32B-Instruct", 1, 2),
    ("meta-llama/Llama-3.3-70B-Instruct", 1, 4),
)
LONG: Final = "meta-llama/Llama-3.1-8B-Instruct"
ARENA, SERVEGEN, AZURE, MOONCAKE = (
    "arena_vtc_27m",
    "semisynth_servegen_multi_2h",
    "azure2023_conv",
    "mooncake_conversation",
)
ARENA_FASTER: Final = 4.0
"""It is a sample: the source's times mean nothing (docs/traces.md)."""
SERVEGEN_STREAMS: Final = 12
KEPT: Final = {AZURE: 0.5, MOONCAKE: 0.2}
"""Of a stream's requests: one model has them all there."""


def stretch(rows: Iterable[TraceRow], begin_s: float, seconds: float, faster: float = 1.0) -> Iterator[TraceRow]:
    """Those of ``seconds`` from ``begin_s`` on, in the time of a trace that is ``faster``, counted from there."""
    for row in rows:
        at_s = row.arrival_s / faster - begin_s
        if 0.0 <= at_s < seconds:
            yield replace(row, arrival_s=at_s)


@lru_cache(maxsize=4)
def recorded(folder: Path, name: str) -> tuple[TraceRow, ...]:
    return tuple(open_trace(folder / f"{name}.parquet").rows())


def streams(folder: Path, seconds: float, chance: random.Random) -> dict[str, list[TraceRow]]:
    """The draw's streams by a name of their own, Mooncake's among them."""
    found: dict[str, list[TraceRow]] = {}

    def add(name: str, rows: Iterable[TraceRow]) -> None:
        for row in rows:
            found.setdefault(f"{name} {row.model}".strip(), []).append(row)

    def begin_s(name: str, faster: float = 1.0) -> float:
        return chance.uniform(0.0, recorded(folder, name)[-1].arrival_s / faster - seconds)

    add(ARENA, stretch(recorded(folder, ARENA), begin_s(ARENA, ARENA_FASTER), seconds, ARENA_FASTER))
    servegen = list(stretch(recorded(folder, SERVEGEN), begin_s(SERVEGEN), seconds))
    chosen = set(chance.sample(sorted({row.model for row in servegen}), SERVEGEN_STREAMS))
    add(SERVEGEN, (row for row in servegen if row.model in chosen))
    for name, number in ((AZURE, 1), (AZURE, 2), (MOONCAKE, 1)):
        part = stretch(recorded(folder, name), begin_s(name), seconds)
        found[f"{name} {number}"] = [row for row in part if chance.random() < KEPT[name]]
    return found


def requests(
    folder: Path, models: tuple[ModelSpec, ...], draw: int, seconds: float
) -> tuple[dict[str, str], list[TraceRow]]:
    """What each model has its requests from, and all of them in order of arrival. Prompts that a model's context does
    not hold are left out."""
    chance = random.Random(draw)
    found = streams(folder, seconds, chance)
    long = chance.choice([m for m in models if m.path == LONG])
    others = [m for m in models if m is not long]
    chance.shuffle(others)
    names = [name for name in sorted(found) if not name.startswith(MOONCAKE)]
    chance.shuffle(names)
    dealt = {f"{MOONCAKE} 1": long, **dict(zip(names, others, strict=False))}
    rows = [
        replace(row, model=str(model.name))
        for name, model in dealt.items()
        for row in found[name]
        if (row.prompt_tokens or 0) + (row.output_tokens or 0) < model.context_tokens
    ]
    return {str(m.name): name for name, m in dealt.items()}, sorted(rows, key=lambda row: (row.arrival_s, row.model))


@lru_cache(maxsize=1)
def workload(pieces: Pieces, folder: Path, draw: int, seconds: float) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The models with their objectives, and the requests, of a draw."""
    plain = catalog(MIX)
    _, rows = requests(folder, plain, draw, seconds)
    base = pieces.kept(
        f"objectives composite {draw} {seconds:g}", lambda: dict(dedicated_objectives(plain, rows, h100_cluster(8)))
    )
    return with_objectives(plain, {key: (value[0], value[1]) for key, value in base.items()}, 5.0, 2.0), rows


def run(pieces: Pieces, folder: Path, draw: int, policy: str, gpus: int, seconds: float) -> dict[str, Any]:
    models, rows = workload(pieces, folder, draw, seconds)
    result = variants.run(policy, h100_cluster(gpus), models, rows)
    met = result.report.all.attainment
    return {
        "both": met.both,
        "ttft": met.ttft,
        "tpot": met.tpot,
        "never_ended": result.stats.never_ended,
        "requests": len(rows),
    }


def name_of(draw: int, policy: str, gpus: int) -> str:
    return f"composite {draw} {policy} {gpus}"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the recorded traces")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--gpus", default="4,6,8,12,16")
    parser.add_argument("--policies", default="+".join(variants.POLICIES), help=variants.HELP)
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    fleets, policies = tuple(map(int, args.gpus.split(","))), tuple(args.policies.split("+"))
    if args.write:
        fleet_tables.print_tables(fleet_tables.finished(pieces, name_of, draws, policies, fleets), fleets)
        return
    wanted = (
        (name_of(draw, policy, gpus), partial(run, pieces, args.traces, draw, policy, gpus, args.seconds))
        for draw in draws
        for gpus in fleets
        for policy in policies
    )
    harness.make(args, pieces, wanted)


if __name__ == "__main__":
    main()
