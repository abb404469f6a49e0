"""Random multicasts with random faults at random moments: whoever is left has every byte. Seeds are in the test ids."""

from __future__ import annotations

import importlib.util
import random
import signal
import time

import pytest

from tests.net.cluster import Cluster
from tests.net.netns import Hosts

pytestmark = pytest.mark.net


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_faults(namespaces: None, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(4, 10)
    slow = {rng.randrange(1, count): rng.choice([20.0, 60.0])} if rng.random() < 0.4 else {}
    with Hosts(count, 400.0, slow) as hosts, Cluster(hosts) as cluster:
        made = cluster.make("m", rng.choice([8, 24]) << 20)
        plan = cluster.plan(rng.choice(["binomial", "chain", "tree", None]), made["nbytes"], rng.choice([4, 16, 40]))
        victims = rng.sample(range(1, count), rng.randint(1, max(1, count // 3)))
        faults = sorted((rng.uniform(0.0, 1.0), v, rng.choice(["kill", "stop", "pull"])) for v in victims)

        def strike(start_s: float) -> None:
            for after_s, victim, how in faults:
                time.sleep(max(0.0, start_s + after_s - time.monotonic()))
                if how == "pull":
                    hosts.set_link(victim, False)
                else:
                    number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
                    cluster.nodes[f"n{victim}"].process.send_signal(number)

        lost = frozenset(f"n{v}" for v in victims)
        answers = cluster.run(plan, "m", during=strike, skip=lost)
        for victim in lost:
            cluster.nodes[victim].process.kill()
        assert {n for n, a in answers.items() if a.get("digest") == made["digest"]} == set(answers), answers


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_nixl_moves_the_bytes(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with Hosts(4) as hosts, Cluster(hosts, ["nixl"]) as cluster:
        made = cluster.make("m", 16 << 20)
        answers = cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m", network="nixl")
        assert all(a.get("digest") == made["digest"] for a in answers.values()), answers


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_a_node_dies_under_nixl(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with Hosts(5) as hosts, Cluster(hosts, ["nixl"]) as cluster:
        made = cluster.make("m", 24 << 20)

        def kill(start_s: float) -> None:
            time.sleep(max(0.0, start_s + 0.3 - time.monotonic()))
            cluster.nodes["n2"].process.kill()

        plan = cluster.plan("binomial", made["nbytes"], 16)
        answers = cluster.run(plan, "m", network="nixl", during=kill, skip=frozenset({"n2"}))
        assert all(a.get("digest") == made["digest"] for a in answers.values()), answers
