"""Multicasts over real links between network namespaces: contents to the byte, through deaths, cuts and slow links.

Nothing here asserts a speed.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from prism.policy.multicast.links import estimate_links
from prism.policy.multicast.planner import PlanRequest, plan
from prism.transfer.link_rates import LinkRates
from tests.net.cluster import Cluster

pytestmark = pytest.mark.net
NBYTES = 24 << 20


def assert_complete(answers: dict[str, dict[str, Any]], digest: str) -> None:
    for name, answer in answers.items():
        assert answer.get("digest") == digest, (name, answer)


@pytest.mark.parametrize("algorithm", ["binomial", "chain", "tree", "one-to-all", None])
def test_every_algorithm_delivers_every_byte(cluster: Cluster, algorithm: str | None) -> None:
    made = cluster.make("m", 8 << 20)
    answers = cluster.run(cluster.plan(algorithm, made["nbytes"], 16), "m")
    assert_complete(answers, made["digest"])


@pytest.mark.parametrize("cluster", [{"count": 3}, {"count": 6}], indirect=True)
def test_numbers_that_are_no_power_of_two(cluster: Cluster) -> None:
    made = cluster.make("m", 8 << 20)
    assert_complete(cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m"), made["digest"])


def test_two_sources(cluster: Cluster) -> None:
    made = cluster.make("m", NBYTES, sources=2)
    answers = cluster.run(cluster.plan("binomial", made["nbytes"], 16, sources=2), "m")
    assert len(answers) == 6
    assert_complete(answers, made["digest"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("victim", "after_s"), [("n1", 0.15), ("n4", 0.4)])
def test_a_node_dies_or_stalls(cluster: Cluster, victim: str, after_s: float, how: signal.Signals) -> None:
    made = cluster.make("m", NBYTES)

    def kill(start_s: float) -> None:
        time.sleep(max(0.0, start_s + after_s - time.monotonic()))
        cluster.nodes[victim].process.send_signal(how)

    plan = cluster.plan("binomial", made["nbytes"], 16)
    answers = cluster.run(plan, "m", during=kill, skip=frozenset({victim}))
    cluster.nodes[victim].process.kill()
    assert_complete(answers, made["digest"])


def test_a_cable_is_pulled(cluster: Cluster) -> None:
    made = cluster.make("m", NBYTES)

    def pull(start_s: float) -> None:
        time.sleep(max(0.0, start_s + 0.25 - time.monotonic()))
        cluster.hosts.set_link(2, False)

    answers = cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m", during=pull, skip=frozenset({"n2"}))
    cluster.nodes["n2"].process.kill()
    assert_complete(answers, made["digest"])


def test_a_cable_that_comes_back(cluster: Cluster) -> None:
    made = cluster.make("m", NBYTES)

    def replug(start_s: float) -> None:
        time.sleep(max(0.0, start_s + 0.25 - time.monotonic()))
        cluster.hosts.set_link(3, False)
        time.sleep(2.0)
        cluster.hosts.set_link(3, True)

    answers = cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m", during=replug)
    assert_complete(answers, made["digest"])


@pytest.mark.parametrize(
    ("cluster", "victim"),
    [({"slow": {1: 40.0}}, "n1"), ({"slow": {3: 20.0}}, "n3")],
    indirect=["cluster"],
)
def test_a_slow_node_does_not_hold_the_others_back(cluster: Cluster, victim: str) -> None:
    """The plan does not know of a node in the middle of the pipeline at a tenth, or a twentieth, of the rate."""
    made = cluster.make("m", NBYTES)
    answers = cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m")
    assert_complete(answers, made["digest"])
    for answer in answers.values():
        assert sum(nbytes for nbytes, _ in answer["by_source"].values()) <= made["nbytes"], "a byte came twice"
    slowest = answers.pop(victim)["took_s"]
    assert all(a["took_s"] < slowest for a in answers.values()), "somebody waited for the slow node's link"


@pytest.mark.parametrize("cluster", [{"count": 5, "slow": {1: 40.0}}], indirect=True)
def test_the_next_plan_knows_a_slow_link_from_what_was_measured(cluster: Cluster) -> None:
    """A tenth of the others' rate: n1 stands in the middle of the first pipeline and passes nothing on in the next."""
    made = cluster.make("m", NBYTES)
    first = cluster.run(cluster.plan("binomial", made["nbytes"], 16), "m")
    assert_complete(first, made["digest"])
    rates: dict[tuple[str, str], float] = {}
    for name, answer in first.items():
        measured = LinkRates()
        measured.note_reception({s: (nbytes, took_s) for s, (nbytes, took_s) in answer["timed"].items()}, 0.0)
        rates |= {(rate.source, name): rate.bytes_s for rate in measured.rates(0.0)}
    known = estimate_links(rates)
    chosen = plan(PlanRequest(("n0",), tuple(first), made["nbytes"], links=known.links, blocks=16))
    assert chosen.nodes[-1] == "n1", (rates, known)
    assert chosen.schedule.sends(chosen.nodes.index("n1")) == []
    cluster.forget(first, "m")
    second = cluster.run(chosen, "m")
    assert_complete(second, made["digest"])
    assert all(source != "n1" for answer in second.values() for source in answer["by_source"])


@pytest.mark.parametrize("cluster", [{"count": 6}], indirect=True)
def test_nodes_join_in_the_middle(cluster: Cluster) -> None:
    made = cluster.make("m", NBYTES)
    plan = cluster.plan("binomial", made["nbytes"], 16, nodes=4)
    answers = cluster.run(plan, "m", joiners={"n4": 0.2, "n5": 0.5})
    assert set(answers) == {"n1", "n2", "n3", "n4", "n5"}
    assert_complete(answers, made["digest"])


def test_the_only_source_dies(cluster: Cluster) -> None:
    made = cluster.make("m", NBYTES)

    def kill(start_s: float) -> None:
        time.sleep(max(0.0, start_s + 0.1 - time.monotonic()))
        cluster.nodes["n0"].process.kill()

    answers = cluster.run(cluster.plan("chain", made["nbytes"], 16), "m", during=kill)
    for answer in answers.values():
        assert "SourceLost" in answer.get("error", ""), answer
