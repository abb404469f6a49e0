"""Question: how much later is the last of the others when a node dies, stalls or is slow in the middle of a multicast?

Command: python -m benchmarks.weights.multicast_faults   (needs root)

8 hosts, 400 Mbit/s, 64 MiB in 16 blocks, binomial pipeline; something happens to n1 (which passes many blocks on to
others) 0.5 s after the start. The bound: the silence after which a node counts as dead (0.5 s), once, and the blocks it
owed, fetched from others meanwhile.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from benchmarks.weights.hosts import BLOCKS, MODEL, NBYTES, best
from prism.transfer.pull_lanes import DEAD_S
from tests.net.cluster import Cluster
from tests.net.netns import Hosts, why_not

VICTIM = 1
AFTER_S = 0.5


def main() -> None:
    if reason := why_not():
        raise SystemExit(f"cannot run here: {reason}")
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with Hosts(8) as hosts, Cluster(hosts) as cluster:
        made = cluster.make(MODEL, NBYTES)
        undisturbed = best(cluster, cluster.plan("binomial", NBYTES, BLOCKS), made["digest"], 2)
        base_s = max(a["took_s"] for n, a in undisturbed.answers.items() if n != f"n{VICTIM}")
        print(f"{base_s:7.3f} s           undisturbed")
    for label, fault in (
        ("killed", _signal(signal.SIGKILL)),
        ("stopped", _signal(signal.SIGSTOP)),
        ("cable pulled", _pull),
    ):
        with Hosts(8) as hosts, Cluster(hosts) as cluster:
            made = cluster.make(MODEL, NBYTES)
            one(cluster, label, fault, made["digest"], base_s)
    with Hosts(8, slow={VICTIM: 40.0}) as hosts, Cluster(hosts) as cluster:
        made = cluster.make(MODEL, NBYTES)
        answers = cluster.run(cluster.plan("binomial", NBYTES, BLOCKS), MODEL, dead_s=DEAD_S)
        report("a tenth of the others' link rate, not known to the plan", answers, base_s)


def one(cluster: Cluster, label: str, fault: Callable[[Cluster], object], digest: str, base_s: float) -> None:
    def strike(start_s: float) -> None:
        time.sleep(max(0.0, start_s + AFTER_S - time.monotonic()))
        fault(cluster)

    victim = f"n{VICTIM}"
    plan = cluster.plan("binomial", NBYTES, BLOCKS)
    answers = cluster.run(plan, MODEL, during=strike, skip=frozenset({victim}), dead_s=DEAD_S)
    cluster.nodes[victim].process.kill()
    assert all(a["digest"] == digest for a in answers.values()), answers
    report(label, answers, base_s)


def report(label: str, answers: dict[str, dict[str, Any]], base_s: float) -> None:
    others = {name: answer for name, answer in answers.items() if name != f"n{VICTIM}"}
    last_s = max(a["took_s"] for a in others.values())
    reroutes = sum(len(a["reroutes"]) for a in others.values())
    print(f"{last_s:7.3f} s {last_s - base_s:+7.3f} s  n1 {label} ({reroutes} transfers given up)", flush=True)


def _signal(number: signal.Signals) -> Callable[[Cluster], object]:
    return lambda cluster: cluster.nodes[f"n{VICTIM}"].process.send_signal(number)


def _pull(cluster: Cluster) -> None:
    cluster.hosts.set_link(VICTIM, False)


if __name__ == "__main__":
    main()
