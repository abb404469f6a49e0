"""Starts one worker per host and runs multicasts over them; used by the tests and by the benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.planner import ALGORITHMS, Plan, PlanRequest, build_schedule, plan
from prism.transfer.session import NodePlan, node_plans
from prism.weights.exchange.pack_windows import window_name
from prism.weights.packs.format import PackKey
from tests.net.netns import Hosts
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_S = 0.6
WARM_UP_S_PER_HOST = 0.05
"""What hosts make ready (memory, connections) they make on the same few processors."""
PATIENT_DEAD_S = 2.0
"""Hosts that share two processors with each other (and with who knows what) are silent for longer than machines are."""


class Node:
    """A worker process. ``ask`` sends a command, ``answer`` waits for its line."""

    def __init__(self, name: str, argv: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.name = name
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT, env=environment
        )

    def ask(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")
        return dict(json.loads(line))

    def call(self, **command: Any) -> dict[str, Any]:
        self.ask(**command)
        return self.answer()

    def stop(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask(do="quit")
                self.process.wait(PATIENCE_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Cluster:
    """Workers on ``hosts``, named n0, n1, ...; everything they make is removed at the end."""

    def __init__(self, hosts: Hosts, networks: Sequence[str] = ()) -> None:
        self.hosts, self._networks = hosts, networks
        self._disk = Path(tempfile.mkdtemp(prefix="prism-net-"))
        self._memory = Path(tempfile.mkdtemp(prefix="prism-net-", dir="/dev/shm"))
        self.nodes: dict[str, Node] = {}
        self.addresses: dict[str, str] = {}
        self._sessions = 0

    def __enter__(self) -> Cluster:
        for host in range(self.hosts.count):
            name = f"n{host}"
            argv = [sys.executable, "-m", "tests.net.worker", name, self.hosts.ip(host)]
            folders = [str(self._disk / name), str(self._memory / name)]
            self.nodes[name] = Node(name, self.hosts.command(host, [*argv, *folders, *self._networks]))
        for name, node in self.nodes.items():
            self.addresses[name] = str(node.answer()["address"])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for node in self.nodes.values():
            node.stop()
        shutil.rmtree(self._disk, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)

    def make(self, model: str, nbytes: int, sources: int = 1, tensors: int = 16) -> dict[str, Any]:
        """Packs the same random weights on the first ``sources`` nodes."""
        command = {"do": "make", "model": model, "nbytes": nbytes, "tensors": tensors, "seed": 7}
        answers = [self.nodes[f"n{i}"].call(**command) for i in range(sources)]
        return answers[0]

    def plan(
        self,
        algorithm: str | None,
        nbytes: int,
        blocks: int | None,
        sources: int = 1,
        mbit: float = 400.0,
        nodes: int | None = None,
    ) -> Plan:
        """The planner's choice for ``algorithm`` None, else that algorithm's schedule over the nodes in order."""
        names = list(self.nodes)[:nodes]
        rate = mbit * 1e6 / 8
        if algorithm is None:
            link = NodeLink(rate, rate)
            senders, receivers = tuple(names[:sources]), tuple(names[sources:])
            return plan(PlanRequest(senders, receivers, nbytes, default_link=link, blocks=blocks))
        assert blocks is not None
        schedule = build_schedule(ALGORITHMS[algorithm], len(names), sources, blocks)
        return Plan(tuple(names), schedule, schedule.steps * nbytes / blocks / rate, {})

    def run(
        self,
        chosen: Plan,
        model: str,
        *,
        dead_s: float = PATIENT_DEAD_S,
        ready: bool = True,
        network: str = "tcp",
        during: Callable[[float], object] | None = None,
        skip: frozenset[str] = frozenset(),
        joiners: Mapping[str, float] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Runs one multicast: every receiver's answer, with ``took_s`` counted from the common start.

        ``during(start_s)`` runs meanwhile (kills, cuts). ``skip`` are nodes whose answer is not waited for. ``joiners``
        start that many seconds later, without a part in the plan.
        """
        self._sessions += 1
        session, window = f"s{self._sessions}", window_name(PackKey(model))
        parts = node_plans(chosen, session, window, self.addresses, network)
        return self.carry_out(parts, dead_s=dead_s, ready=ready, during=during, skip=skip, joiners=joiners)

    def carry_out(
        self,
        parts: Mapping[str, NodePlan],
        *,
        dead_s: float = PATIENT_DEAD_S,
        ready: bool = True,
        during: Callable[[float], object] | None = None,
        skip: frozenset[str] = frozenset(),
        joiners: Mapping[str, float] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """As :meth:`run`, with every node's part made already."""
        any_part = next(iter(parts.values()))
        sources = [name for name in parts if name in any_part.sources]
        for name in sources:
            self.nodes[name].call(do="join", plan=_json(parts[name]))
        start_s = time.monotonic() + WARM_UP_S + WARM_UP_S_PER_HOST * len(self.nodes)
        receivers = [n for n in parts if n not in sources]
        for name in receivers:
            self.nodes[name].ask(do="fetch", plan=_json(parts[name]), at_s=start_s, dead_s=dead_s, ready=ready)
        for name, later_s in (joiners or {}).items():
            part = NodePlan(
                session=any_part.session,
                window=any_part.window,
                node=name,
                addresses={**any_part.addresses, name: self.addresses[name]},
                sources=any_part.sources,
                pieces=any_part.pieces,
                network=any_part.network,
            )
            self.nodes[name].ask(do="fetch", plan=_json(part), at_s=start_s + later_s, dead_s=dead_s, ready=False)
        if during is not None:
            during(start_s)
        answers = {n: self.nodes[n].answer() for n in [*receivers, *(joiners or {})] if n not in skip}
        for name, answer in answers.items():
            if "error" not in answer:
                answer.update(self.nodes[name].call(do="digest"))
            answer["took_s"] = answer.get("end_s", float("nan")) - start_s
        return answers

    def forget(self, answers: Mapping[str, object], model: str, keep: int = 1) -> None:
        """Makes every receiver drop the pack, so that the next run starts from nothing."""
        for name in answers:
            if name not in {f"n{i}" for i in range(keep)}:
                self.nodes[name].call(do="drop", model=model, session=f"s{self._sessions}")


def _json(part: NodePlan) -> str:
    return msgspec.json.encode(part).decode()
