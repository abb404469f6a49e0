"""Questions: how many blocks are best (the elbow of lambda-Scale's Figure 18), and what does each of its optimisations
bring here (Figure 17: memory made ahead, tensors packed, registered memory read one-sided)?

Command: python -m benchmarks.weights.multicast_blocks [--part elbow|breakdown] [--reps 2]   (needs root)

``elbow``: 8 hosts, 400 Mbit/s, 64 MiB in 2 to 64 blocks. ``breakdown``: 2 hosts, 10 Gbit/s, 64 MiB: one tensor (1 MiB)
at a time into memory that is made on demand; the same into memory and over connections made ahead; 16 packed blocks;
the same read one-sided by NIXL where it is installed.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

from benchmarks.weights.hosts import BLOCKS, MODEL, NBYTES, best, line
from tests.net.cluster import Cluster
from tests.net.netns import Hosts, why_not

TENSORS = 64


def elbow(reps: int) -> None:
    with Hosts(8) as hosts, Cluster(hosts) as cluster:
        made = cluster.make(MODEL, NBYTES)
        for blocks in (2, 4, 8, 16, 32, 64):
            for name in ("binomial", "chain"):
                run = best(cluster, cluster.plan(name, NBYTES, blocks), made["digest"], reps)
                line(f"b={blocks} {name}", run)


def breakdown(reps: int) -> None:
    networks = ["nixl"] if importlib.util.find_spec("nixl") else []
    os.environ.setdefault("UCX_TLS", "tcp")
    mbit = 10_000.0
    with Hosts(2, mbit) as hosts, Cluster(hosts, networks) as cluster:
        made = cluster.make(MODEL, NBYTES)
        by_tensor = cluster.plan("chain", NBYTES, TENSORS, mbit=mbit)
        packed = cluster.plan("chain", NBYTES, BLOCKS, mbit=mbit)
        base = best(cluster, by_tensor, made["digest"], reps, ready=False).last_s
        print(f"{base * 1e3:7.1f} ms  by tensor, memory and connections on demand")
        steps = [("memory and connections ahead", by_tensor, "tcp"), ("packed into 16 blocks", packed, "tcp")]
        steps += [("registered memory, one-sided (NIXL)", packed, "nixl")] if networks else []
        for label, plan, network in steps:
            seconds = best(cluster, plan, made["digest"], reps, network=network).last_s
            print(f"{seconds * 1e3:7.1f} ms  + {label} ({seconds / base:.0%})")


PARTS = {"elbow": elbow, "breakdown": breakdown}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--reps", type=int, default=2)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"cannot run here: {reason}")
    for part in options.part or list(PARTS):
        print(f"--- {part} (load before: {os.getloadavg()[0]:.1f})")
        PARTS[part](options.reps)


if __name__ == "__main__":
    main()
