"""What the multicast benchmarks share: the link, its floor, and one measured run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from prism.policy.multicast.planner import Plan
from prism.transfer.pull_lanes import DEAD_S
from tests.net.cluster import ROOT, Cluster
from tests.net.netns import Hosts

MBIT: Final = 400.0
NBYTES: Final = 64 << 20
BLOCKS: Final = 16
PAYLOAD_SHARE: Final = 1448 / 1514
"""TCP payload per Ethernet frame as the shaper counts it: a link of 400 Mbit/s carries 64 MiB in 1.403 s."""
LINK_S: Final = NBYTES * 8 / (MBIT * 1e6 * PAYLOAD_SHARE)
MODEL: Final = "benchmark"


# a benchmark that is told to end removes its hosts and workers first
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@dataclass(frozen=True, slots=True)
class Run:
    """One measured multicast: seconds until the last receiver had everything, and the schedule's floor."""

    last_s: float
    floor_s: float
    answers: dict[str, dict[str, Any]]

    @property
    def cpu_s(self) -> float:
        """What the receiving processes took, sends to each other included; what the kernel does for all is not."""
        return float(sum(answer["cpu_s"] for answer in self.answers.values()))

    @property
    def ratio(self) -> float:
        return self.last_s / self.floor_s


def floor_s(plan: Plan) -> float:
    """Steps times one block's time on the link."""
    return plan.schedule.steps * LINK_S / plan.schedule.blocks


def measure(cluster: Cluster, plan: Plan, digest: str, network: str = "tcp", ready: bool = True, keep: int = 1) -> Run:
    """Runs ``plan`` and checks every receiver's contents."""
    answers = cluster.run(plan, MODEL, network=network, ready=ready, dead_s=DEAD_S)
    wrong = [name for name, answer in answers.items() if answer.get("digest") != digest]
    assert not wrong, {name: answers[name] for name in wrong}
    cluster.forget(answers, MODEL, keep)
    return Run(max(a["took_s"] for a in answers.values()), floor_s(plan), answers)


def best(cluster: Cluster, plan: Plan, digest: str, reps: int, **options: Any) -> Run:
    """The fastest of ``reps`` runs: other work on the machine only ever adds to a run."""
    return min((measure(cluster, plan, digest, **options) for _ in range(reps)), key=lambda run: run.last_s)


def gloo_broadcast(hosts: Hosts, reps: int) -> float:
    """Seconds of gloo's broadcast of the same bytes over the same hosts, the best of ``reps``."""
    processes = []
    for host in range(hosts.count):
        argv = [sys.executable, "-m", "benchmarks.weights.gloo_worker", str(host), str(hosts.count), hosts.ip(0)]
        command = hosts.command(host, [*argv, str(NBYTES), str(reps)])
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    printed = [process.communicate(timeout=300)[0] for process in processes]
    return min(float(line) for line in printed[0].split())


def line(name: str, run: Run, against: float | None = None) -> None:
    """One row of a table; ``against`` is the time that others are compared with."""
    times = f"{run.last_s / against:5.2f}x" if against else "      "
    reroutes = sum(len(a["reroutes"]) for a in run.answers.values())
    note = f"  ({reroutes} transfers rerouted)" if reroutes else ""
    taken = f"{run.last_s:7.3f} s  floor {run.floor_s:6.3f} s  {run.ratio:6.3f}  {times}"
    print(f"{name:34s} {taken}  receivers {run.cpu_s:.2f} cpu s{note}", flush=True)


def settle() -> None:
    """A moment for the kernel to finish with what the last measurement left."""
    time.sleep(0.5)
