"""Question: how close does each multicast come to its schedule's floor on real links, and how do they compare?

Command: python -m benchmarks.weights.multicast_hosts [--part algorithms|sizes|sources|nixl] [--reps 3]   (needs root)

Hosts are network namespaces, 400 Mbit/s links both ways, 64 MiB in 16 blocks, time until the last receiver has verified
everything. ``algorithms``: 8 hosts, every algorithm and gloo's broadcast. ``sizes``: N = 3, 5, 6, 7, 16, binomial
pipeline, chain and the planner's choice. ``sources``: k = 1, 2, 4, time until receivers of different sub-groups hold
the model together. ``nixl``: the same multicast with NIXL moving the bytes.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.weights.hosts import BLOCKS, MODEL, NBYTES, Run, best, gloo_broadcast, line, settle
from prism.policy.multicast.groups import pipelines, sub_groups
from tests.net.cluster import Cluster
from tests.net.netns import Hosts, why_not


def algorithms(reps: int) -> None:
    with Hosts(8) as hosts:
        with Cluster(hosts) as cluster:
            made = cluster.make(MODEL, NBYTES)
            binomial = best(cluster, cluster.plan("binomial", NBYTES, BLOCKS), made["digest"], reps)
            line("binomial pipeline", binomial, binomial.last_s)
            cold = best(cluster, cluster.plan("binomial", NBYTES, BLOCKS), made["digest"], reps, ready=False)
            line("  with set-up (memory, connections)", cold, binomial.last_s)
            for name in ("chain", "tree", "one-to-all"):
                run = best(
                    cluster, cluster.plan(name, NBYTES, BLOCKS), made["digest"], 1 if name == "one-to-all" else reps
                )
                line(name, run, binomial.last_s)
        settle()
        seconds = gloo_broadcast(hosts, 2)
        print(f"{'gloo broadcast':34s} {seconds:7.3f} s {seconds / binomial.last_s:30.2f}x", flush=True)


def sizes(reps: int) -> None:
    for count in (3, 5, 6, 7, 16):
        with Hosts(count) as hosts, Cluster(hosts) as cluster:
            made = cluster.make(MODEL, NBYTES)
            runs = {
                name: best(cluster, cluster.plan(name, NBYTES, BLOCKS), made["digest"], reps)
                for name in ("binomial", "chain")
            }
            fastest = min(run.last_s for run in runs.values())
            for name, run in runs.items():
                line(f"N={count} {name}", run, fastest)
            chosen = cluster.plan(None, NBYTES, BLOCKS)
            line(
                f"N={count} planner: {chosen.schedule.algorithm}", best(cluster, chosen, made["digest"], reps), fastest
            )


def sources(reps: int) -> None:
    with Hosts(8) as hosts, Cluster(hosts) as cluster:
        made = cluster.make(MODEL, NBYTES, sources=4)
        firsts: dict[int, float] = {}
        for k in (4, 2, 1):
            for node in range(k, 4):
                cluster.nodes[f"n{node}"].call(do="drop", model=MODEL, session="")
            run = best(cluster, cluster.plan("binomial", NBYTES, BLOCKS, sources=k), made["digest"], reps, keep=k)
            line(f"k={k}", run)
            groups = [group[1:] for group in sub_groups(8, k)]
            first = pipelines(groups)[0] if k > 1 else [groups[0][0]]
            firsts[k] = first_model_s(run, first)
            print(f"    first pipeline {first} holds the model after {firsts[k]:.3f} s", flush=True)
        for k in (2, 4):
            print(f"k={k}: first complete model after {firsts[k] / firsts[1]:.2f} of the time of k=1")


def first_model_s(run: Run, nodes: list[int]) -> float:
    """Seconds until ``nodes`` together hold every piece."""
    start_s = min(a["end_s"] - a["took_s"] for a in run.answers.values())
    firsts: dict[str, float] = {}
    for node in nodes:
        for piece, at_s in run.answers[f"n{node}"]["pieces_s"].items():
            firsts[piece] = min(firsts.get(piece, float("inf")), at_s - start_s)
    return max(firsts.values())


def nixl(reps: int) -> None:
    os.environ.setdefault("UCX_TLS", "tcp")
    with Hosts(8) as hosts, Cluster(hosts, ["nixl"]) as cluster:
        made = cluster.make(MODEL, NBYTES)
        for name in ("binomial", "chain"):
            plan = cluster.plan(name, NBYTES, BLOCKS)
            tcp = best(cluster, plan, made["digest"], reps)
            line(f"{name}, bytes over sockets", tcp, tcp.last_s)
            line(f"{name}, bytes over NIXL", best(cluster, plan, made["digest"], reps, network="nixl"), tcp.last_s)


PARTS = {"algorithms": algorithms, "sizes": sizes, "sources": sources, "nixl": nixl}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"cannot run here: {reason}")
    for part in options.part or ["algorithms"]:
        print(f"--- {part} (load before: {os.getloadavg()[0]:.1f})")
        PARTS[part](options.reps)


if __name__ == "__main__":
    main()
