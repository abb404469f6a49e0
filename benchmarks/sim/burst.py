"""How close does scale-out come to an ideal that knows of the burst?

One model on eight H100s, alone: one request per second, then sixty. The ideal has all eight instances when the burst
begins; Prism has to notice, decide and load. TTFT percentiles of the requests of the burst, and when the instances
served.

    python -m benchmarks.sim.burst [--draws 5] [--seconds 40]

The last result is in docs/results/scheduler.md.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace

from prism.core.events import OperatorLoad
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_file import parse_cluster
from prism.sim.job import Job
from prism.sim.models import known_spec
from prism.sim.recorder import RunRecorder
from prism.sim.world import World

MODELS = {"8B": "meta-llama/Llama-3.1-8B-Instruct", "14B": "Qwen/Qwen2.5-14B-Instruct"}
CALM_RPS, BURST_RPS = 1.0, 60.0
WARM_UP_S, CALM_S = 30.0, 20.0
POLICIES = ("ideal", "prism", "without standing", "one instance")


@dataclass(frozen=True)
class BurstResult:
    """Of one run; TTFT of the requests that came with the burst or after it."""

    p50_s: float
    p99_s: float
    tpot_met: float
    served_after_s: tuple[float, ...]
    """When each further instance served, after the burst began."""
    load_s: float
    """What loading an instance took, at the longest."""


def jobs(model: ModelSpec, seconds: float, draw: int) -> list[Job]:
    """Prompts of 500 to 2,500 tokens, answers of 100 to 400."""
    rng, made = random.Random(draw), list[Job]()
    for rate, begin_s, end_s in ((CALM_RPS, 0.0, CALM_S), (BURST_RPS, CALM_S, CALM_S + seconds)):
        at_s = begin_s + rng.expovariate(rate)
        while at_s < end_s:
            made.append(Job(len(made), model, WARM_UP_S + at_s, rng.randint(500, 2500), rng.randint(100, 400)))
            at_s += rng.expovariate(rate)
    return made


def settings(policy: str) -> PolicySettings:
    chosen = PolicySettings.named("prism")
    cluster = replace(
        chosen.cluster,
        standing_replicas=policy == "prism",
        max_replicas=1 if policy == "one instance" else chosen.cluster.max_replicas,
    )
    return replace(chosen, cluster=cluster)


def run(name: str, policy: str, seconds: float, draw: int, gpus: int = 8) -> BurstResult:
    """One burst of ``seconds``."""
    model = known_spec("bursting", MODELS[name], 1.0, 0.05)
    recorder = RunRecorder(0.002)
    cluster = parse_cluster({"groups": [{"gpu": "H100", "gpus_per_node": gpus}]}, "burst")
    world = World(cluster, [model], settings(policy), recorder)
    world.join()
    world.control.tell(OperatorLoad(model.name))
    world.queue.run_until(WARM_UP_S)
    burst_s = WARM_UP_S + CALM_S
    if policy == "ideal":
        load = OperatorLoad(model.name, instances=gpus)
        world.queue.after(1.0, world.control.tell, load)
    for _ in world.run(iter(jobs(model, seconds, draw))):
        pass
    records = [r for r in recorder.records if r.arrival_s >= burst_s and r.ttft_s is not None]
    ttft_s = sorted(r.ttft_s for r in records if r.ttft_s is not None)
    lives = [r.ready_s for r in recorder.timeline({}).residences if r.ready_s is not None]
    return BurstResult(
        ttft_s[len(ttft_s) // 2],
        ttft_s[int(0.99 * len(ttft_s))],
        sum(r.tpot_s is not None and r.tpot_s <= model.slo_tpot_s for r in records) / len(records),
        tuple(sorted(at_s - burst_s for at_s in lives if at_s > burst_s)),
        max(recorder.activation_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args()
    for name in MODELS:
        for policy in POLICIES:
            for draw in range(1, args.draws + 1):
                found = run(name, policy, args.seconds, draw)
                served = " ".join(f"{s:.2f}" for s in found.served_after_s[:8])
                print(
                    f"{name:4s} {policy:17s} draw {draw}: TTFT p50 {found.p50_s:6.2f} s, p99 {found.p99_s:6.2f} s, "
                    f"TPOT met {found.tpot_met:.3f}; instances after {served} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
