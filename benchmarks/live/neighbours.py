"""What does a burst on one of eight models do to it, and to the seven others on the same devices?

Simulated with the production schedulers (``prism sim``'s world): eight models of one size on 8 to 64 H100s, in machines
of eight with 400 Gbit/s; seven get the generator's trace at 4 requests/s together, the eighth 1 request/s, 60 for 20 s,
and 1 again (``--rise-s``: with so many seconds more before it, in which the rate rises). The seven are the same without
the burst. ``--idle``: so many further models of that size are asked once each, at any moment of these sixty seconds, so
that idle ones fill the memory when the burst begins. Every machine keeps its share of the catalog in host memory (one
copy of each model in the fleet), others come over the network. Ways:

- *auto*, *pair*, *pipelines*, *whole*: Prism with ``live_scaling.mode`` so; *whole* are replicas as they were,
- *serverlessllm*: the rival policy, a device to one instance at a time,
- *no loading*: Prism, with weights and engines that are there in no time.

"times" is serverlessllm's p90 over this way's: where loading takes no time that is what there is to gain by loading
sooner. "spare" is the part of the device time that instances beyond one took after the burst, where nobody wanted their
memory (:mod:`prism.scheduler.victims`: they are the first to leave). "/ ideal" is device time over that of the same
burst where loading takes no time and nobody else is there (:mod:`benchmarks.live.burst`).

    python -m benchmarks.live.neighbours [--only 13B] [--draws 3] [--first 1] [--rise-s 15] [--nic-gbit 400] [--idle 40]

Goals: p90 of the burst's first tokens a fifth of serverlessllm's, device time within 10% of ideal, the neighbours'
attainment at most 2 points below what it is without the burst. The last result is in docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median
from typing import Final

import numpy as np

from benchmarks.live.burst import LONGEST, STEPS, Steps, burst_jobs, play, rising
from prism.core.ids import ModelName
from prism.core.settings import LiveMode, PolicySettings
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.live_arrivals import LiveSystem
from prism.sim.models import known_spec
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.generate import GeneratorSpec, generate
from prism.trace.report import RequestRecord
from prism.trace.row import TraceRow

CASES: Final = (
    ("8B, 8 GPUs", "meta-llama/Llama-3.1-8B-Instruct", 1, 8),
    ("13B, 16 GPUs", "meta-llama/Llama-2-13b-chat-hf", 1, 16),
    ("70B, 64 GPUs", "meta-llama/Llama-3.3-70B-Instruct", 4, 64),
)
RIVAL: Final = "serverlessllm"
WAYS: Final = ("auto", "pair", "pipelines", "whole", RIVAL, "no loading")
BURSTING: Final = "bursting"
OTHERS: Final = tuple(f"other-{i}" for i in range(7))
OTHERS_RPS: Final = 4.0
HARDLY_ANSWERED: Final = 150
"""Tokens of an answer of a model that is asked once."""
WARM_UP_S: Final = 120.0
"""A fleet's memory is full of 70B models after about a minute."""
TTFT_S, TPOT_S = 1.0, 0.1
NO_TIME: Final = {"relayout": 0.0, "ready": 0.0, "park": 0.0, "command": 0.0}
NIC_GBIT: Final = 400.0
"""Of a machine, which its eight GPUs share."""
FAST_LINKS: Final = 1e15


@dataclass(frozen=True, slots=True)
class Setting:
    """What all draws and ways of a run have in common."""

    nic_gbit: float = NIC_GBIT
    steps: Steps = STEPS
    idle_models: int = 0
    """Further models of the same size, each of which is asked once."""


@dataclass(frozen=True, slots=True)
class BurstOutcome:
    """Of one run: the burst's requests, what its instances took, and the shares that met both of the others' requests,
    and of those of models that are asked once."""

    p50_s: float
    p90_s: float
    last_s: float
    ttft_met: float
    met: float
    device_s: float
    spare_s: float
    """Of it, what instances beyond one took after the burst: they are the first to leave when anybody wants memory."""
    others_met: float
    idle_met: float


def cluster(gpus: int, *, loading: bool, nic_gbit: float) -> Cluster:
    group: dict[str, object] = {"gpu": "H100", "nodes": gpus // 8, "gpus_per_node": 8}
    if loading:
        network = {"nic_gbit": nic_gbit}
        return parse_cluster({"groups": [group], "network": network, "load": {"source": "spread"}}, "neighbours")
    group["rates"] = {"pcie_bytes_per_s": FAST_LINKS}
    fast = {"groups": [group | {"dram_gbytes_per_s": FAST_LINKS}], "timing": NO_TIME, "load": {"parked_per_device": 8}}
    return parse_cluster(fast, "neighbours, no loading")


def policy(way: str, instances: int) -> PolicySettings:
    if way == RIVAL:
        return PolicySettings.named(way)
    chosen = PolicySettings.named("prism")
    mode = LiveMode.WHOLE if way == "no loading" else LiveMode(way)
    return replace(chosen, cluster=replace(chosen.cluster, live=mode, max_replicas=instances))


def others(draw: int, steps: Steps) -> Iterator[TraceRow]:
    spec = GeneratorSpec(
        models=len(OTHERS),
        duration_s=sum(length_s for length_s, _ in steps),
        rate_rps=OTHERS_RPS,
        lengths="azure-conv",
        names=OTHERS,
    )
    for row in generate(spec, draw):
        yield replace(row, prompt_tokens=min(row.prompt_tokens or 1, LONGEST))


def hardly_asked(draw: int, setting: Setting) -> Iterator[TraceRow]:
    """One request of each of the idle models, at any time."""
    numbers = np.random.default_rng([draw, 1])
    end_s = sum(length_s for length_s, _ in setting.steps)
    for index, arrival_s in sorted(enumerate(numbers.uniform(0.0, end_s, setting.idle_models)), key=itemgetter(1)):
        yield TraceRow(float(arrival_s), f"idle-{index}", int(numbers.integers(100, LONGEST)), HARDLY_ANSWERED)


def burst(draw: int, steps: Steps) -> Iterator[TraceRow]:
    for job in burst_jobs(draw, steps):
        yield TraceRow(job.arrival_s, BURSTING, job.prompt_tokens, job.answer_tokens)


def rows(draw: int, setting: Setting, *, bursting: bool) -> Iterable[TraceRow]:
    found = [others(draw, setting.steps)] + ([burst(draw, setting.steps)] if bursting else [])
    if setting.idle_models:
        found.append(hardly_asked(draw, setting))
    return heapq.merge(*found, key=lambda row: row.arrival_s)


def run(path: str, tp: int, gpus: int, way: str, draw: int, setting: Setting, *, bursting: bool = True) -> SimResult:
    names = (BURSTING, *OTHERS, *(f"idle-{i}" for i in range(setting.idle_models)))
    models = tuple(known_spec(name, path, TTFT_S, TPOT_S, tp) for name in names)
    fleet = cluster(gpus, loading=way != "no loading", nic_gbit=setting.nic_gbit)

    def requests() -> Iterable[TraceRow]:
        return rows(draw, setting, bursting=bursting)

    spec = SimSpec(fleet, models, policy(way, gpus // tp), requests, preload_share=1.0)
    return simulate(replace(spec, warm_up_s=WARM_UP_S) if setting.idle_models else spec)


def met(records: Sequence[RequestRecord]) -> float:
    return sum(r.met_ttft() and r.met_tpot() for r in records) / len(records) if records else 1.0


def met_beside(result: SimResult) -> tuple[float, float]:
    """The seven others' goodput, and that of the models which are asked once."""
    beside = [r for r in result.world.recorder.records if r.model != BURSTING]
    seven = met([r for r in beside if r.model in OTHERS])
    return seven, met([r for r in beside if r.model not in OTHERS])


def outcome(result: SimResult, steps: Steps) -> BurstOutcome:
    records = result.world.recorder.records
    mine = [r for r in records if r.model == BURSTING]
    ttft_s = sorted(float("inf") if r.ttft_s is None else r.ttft_s for r in mine)
    end_s = sum(length_s for length_s, _ in steps)
    timeline = result.report.timeline
    assert timeline is not None
    stays = [r for r in timeline.residences if r.model == BURSTING]

    def device_s(since_s: float) -> float:
        ends = (min(end_s, r.end_s if r.end_s is not None else end_s) - max(since_s, r.start_s) for r in stays)
        return sum(max(0.0, took_s) for took_s in ends)

    burst_s = end_s - steps[-1][0]
    one = result.world.specs[ModelName(BURSTING)].tp * steps[-1][0]
    return BurstOutcome(
        ttft_s[len(ttft_s) // 2],
        ttft_s[int(0.9 * len(ttft_s))],
        ttft_s[-1],
        sum(r.met_ttft() for r in mine) / len(mine),
        met(mine),
        device_s(0.0),
        max(0.0, device_s(burst_s) - one),
        *met_beside(result),
    )


def calmly(path: str, tp: int, gpus: int, way: str, draw: int, setting: Setting) -> tuple[float, float]:
    """:func:`met_beside` without the burst."""
    return met_beside(run(path, tp, gpus, way, draw, setting, bursting=False))


def compare(
    label: str, path: str, tp: int, gpus: int, draws: Sequence[int], setting: Setting, ways: Sequence[str]
) -> None:
    steps = setting.steps
    found = {way: [outcome(run(path, tp, gpus, way, d, setting), steps) for d in draws] for way in ways}
    calm = {way: [calmly(path, tp, gpus, way, d, setting) for d in draws] for way in ways}
    spec = known_spec(label, path, TTFT_S, TPOT_S, tp)
    ideal_s = median(play(LiveSystem.IDEAL, spec, gpus // tp, burst_jobs(draw, steps)).device_s for draw in draws)
    rival_s = median(one.p90_s for one in found[RIVAL])
    for way in ways:
        runs = found[way]
        device_s = median(one.device_s for one in runs)
        beside = [(median(one.others_met for one in runs), median(seven for seven, _ in calm[way]))]
        if setting.idle_models:
            beside.append((median(one.idle_met for one in runs), median(idle for _, idle in calm[way])))
        cells = (
            f"{median(one.ttft_met for one in runs):.1%}",
            f"{median(one.met for one in runs):.1%}",
            f"{median(one.p50_s for one in runs):.2f}",
            f"{median(one.p90_s for one in runs):.2f}",
            f"{rival_s / median(one.p90_s for one in runs):.1f}",
            f"{median(one.last_s for one in runs):.2f}",
            f"{device_s:.0f}",
            f"{median(one.spare_s for one in runs):.0f}",
            f"{device_s / ideal_s:.2f}",
            *(f"{with_it:.1%} | {100 * (with_it - without):+.1f}" for with_it, without in beside),
        )
        print(f"| {label} | {way} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="what the label of a case begins with")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="number of the first draw")
    parser.add_argument("--nic-gbit", type=float, default=NIC_GBIT, help="network of a machine of eight GPUs")
    parser.add_argument("--rise-s", type=float, default=0.0, help="seconds in which the burst's rate is reached")
    parser.add_argument("--idle", type=int, default=0, help="further models, each asked once")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help=f"{RIVAL} is always one of them")
    args = parser.parse_args()
    ways = tuple(way for way in WAYS if way in (*args.ways, RIVAL))
    setting = Setting(args.nic_gbit, rising(args.rise_s), args.idle)
    columns = "TTFT met | goodput | p50, s | p90, s | times | last, s | device s | spare | / ideal | others' goodput"
    columns += " | by the burst" + " | asked once | by the burst" * bool(setting.idle_models)
    print(f"| models | way | {columns} |")
    print("|---" * (3 + columns.count(" | ")) + "|")
    for label, path, tp, gpus in CASES:
        if label.startswith(args.only):
            compare(label, path, tp, gpus, range(args.first, args.first + args.draws), setting, ways)


if __name__ == "__main__":
    main()
