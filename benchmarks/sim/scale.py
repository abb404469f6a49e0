"""How fast is the simulator, and what does an idle model cost?

Three runs of ``prism`` on modelled H100s, one core each:

- ``hour``: 58 models on 32 GPUs, one hour, 15 requests/s (goal: at least 200 times real time);
- ``million``: 1,000,000 requests for 10,000 models on 1,000 GPUs in one hour (goal: 10 minutes, less than 4 GB);
- ``idle``: the same 20,000 requests with 100 and with 10,000 models in the catalog (cost per event must not grow).

    python -m benchmarks.sim.scale [hour] [million] [idle] [--requests N] [--profile]

The result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import time
from dataclasses import replace

from benchmarks.sim.workloads import MIX_58, catalog, h100_cluster, requests
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.generate import preset
from prism.trace.row import TraceRow

LARGE_REBALANCE_S = 60.0
"""Algorithm 1 over thousands of loaded models and a thousand devices is planned once a minute, not every 5 s."""


def prism_settings(rebalance_s: float | None = None) -> PolicySettings:
    settings = PolicySettings.named("prism")
    if rebalance_s is None:
        return settings
    return replace(settings, cluster=replace(settings.cluster, rebalance_every_s=rebalance_s))


def show(name: str, result: SimResult) -> None:
    stats, group = result.stats, result.report.all
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    per_event_us, per_request_us = (stats.cpu_s / n * 1e6 for n in (stats.events, stats.requests))
    print(
        f"{name}: {stats.requests:,} requests, {stats.simulated_s:,.0f} s in {stats.cpu_s:.1f} s of one core "
        f"({stats.wall_s:.1f} s wall; {stats.times_real:.0f}x real time), {stats.events:,} events, "
        f"{per_event_us:.0f} us/event, {per_request_us:.0f} us/request, {stats.activations:,} activations, "
        f"TTFT ok {group.attainment.ttft:.1%}, peak memory {memory_gb:.2f} GB",
        flush=True,
    )


def progress(at_s: float, ended: int) -> None:
    """A line for every five minutes of the trace."""
    print(f"    {at_s:6,.0f} s: {ended:,} ended, {time.process_time():.0f} s of processor time so far", flush=True)


def run(
    name: str,
    cluster: Cluster,
    models: tuple[ModelSpec, ...],
    rows: list[TraceRow],
    policy: PolicySettings,
    profile: bool,
) -> None:
    spec = SimSpec(cluster, models, policy, lambda: rows)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    result = simulate(spec, progress=progress, progress_every_s=300.0)
    profiler.disable()
    show(name, result)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def hour(profile: bool) -> None:
    models = catalog(MIX_58)
    rows = requests(replace(preset("novita"), rate_rps=15.0, duration_s=3600.0), models)
    run("hour", h100_cluster(32), models, rows, prism_settings(), profile)


def many_models(count: int) -> tuple[ModelSpec, ...]:
    single = tuple(line for line in MIX_58 if line[2] == 1)
    copies = -(-count // sum(n for _, n, _ in single))
    return catalog(single, copies=copies)[:count]


def million(profile: bool, total: int) -> None:
    models = many_models(10_000)
    duration_s = 3600.0 * total / 1_000_000
    spec = replace(preset("novita"), rate_rps=278.0, duration_s=duration_s, groups=64)
    cluster = h100_cluster(1000, load={"source": "spread"}, timing={"report_every": "5s"})
    run("million", cluster, models, requests(spec, models)[:total], prism_settings(LARGE_REBALANCE_S), profile)


def idle(profile: bool) -> None:
    used = many_models(100)
    rows = requests(replace(preset("novita"), rate_rps=15.0, duration_s=20_000 / 15.0), used)
    for count in (100, 10_000):
        run(
            f"idle {count} models",
            h100_cluster(32),
            many_models(10_000)[:count] if count > 100 else used,
            _named(rows, count),
            prism_settings(),
            profile,
        )


def _named(rows: list[TraceRow], count: int) -> list[TraceRow]:
    """Names are padded to the catalog's size."""
    if count <= 100:
        return rows
    names = {str(a.name): str(b.name) for a, b in zip(many_models(100), many_models(10_000), strict=False)}
    return [replace(row, model=names[row.model]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["hour", "million", "idle"])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if "hour" in args.what:
        hour(args.profile)
    if "idle" in args.what:
        idle(args.profile)
    if "million" in args.what:
        million(args.profile, args.requests)


if __name__ == "__main__":
    main()
