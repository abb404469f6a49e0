"""Instances that serve over another one while their weights arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from prism.core.effects import Activate
from prism.core.events import OperatorLoad
from prism.core.ids import DeviceId, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.specs import ModelSpec
from prism.sim.engine import Engine

from .helpers import h100s
from .scale_out import ScaleOut, llama_8b

SLOW_NETWORK = {"network": {"nic_gbit": 40.0}, "load": {"source": "spread"}}
"""An 8B model takes 3.5 s to another machine."""


class Pair(ScaleOut):
    """One instance serves; further ones, ``instances`` in all, are asked for at 30 s, each on another machine, while
    ``rate`` requests/s come."""

    def __init__(self, live: LiveMode, rate: float = 4.0, spec: ModelSpec | None = None, instances: int = 2) -> None:
        super().__init__(h100s(1, instances, **SLOW_NETWORK), spec or llama_8b(), live)
        self.tell(OperatorLoad(self.spec.name))
        self.world.queue.run_until(30.0)
        self.tell(OperatorLoad(self.spec.name, instances=instances))
        self.ask(int(20 * rate), rate, since_s=30.0)


def test_a_paired_instance_serves_long_before_its_weights_are_there() -> None:
    whole, paired = Pair(LiveMode.WHOLE), Pair(LiveMode.PAIR)
    for pair in (whole, paired):
        pair.run()
        assert len(pair.recorder.records) == len(pair.jobs) and not any(r.error for r in pair.recorder.records)
        assert len(pair.engines()) == 2 and all(engine.steps for engine in pair.engines())
    (_, first), (whole_s, second) = whole.finished()
    assert not first.early and not second.early
    (_, first), (early_s, second) = paired.finished()
    assert not first.early and second.early
    assert early_s - 30.0 < 0.5 * (whole_s - 30.0)
    assert all(engine._lean is None for engine in paired.engines())


def loading_s(gpus: int, nodes: int, orders: Sequence[tuple[float, int, LiveMode]]) -> list[float]:
    """How long each instance takes that is ordered at a time, on a machine, so; the first one has the weights there."""
    made = ScaleOut(h100s(gpus, nodes, **SLOW_NETWORK), llama_8b(), LiveMode.WHOLE)
    world, name = made.world, made.spec.name
    (home, *_), by_node = world.roads.host_cache.holders(name), dict[NodeId, list[DeviceId]]()
    for id, device in world.topology.devices.items():
        by_node.setdefault(device.node, []).append(id)
    machines = [by_node.pop(home), *by_node.values()]
    for number, (at_s, machine, live) in enumerate(orders):
        world.queue.run_until(at_s)
        parts = whole_model((machines[machine].pop(),))
        world.nodes.activate(Activate(InstanceKey(name, number), parts, because(ReasonCode.OPERATOR), None, live))
    world.queue.run_until(60.0)
    made_in = [world.nodes.instances[InstanceKey(name, number)].activation for number in range(len(orders))]
    return [one.loaded_s - at_s for one, (at_s, *_) in zip(made_in, orders, strict=True)]  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("first", [LiveMode.WHOLE, LiveMode.PAIR])
def test_to_serve_early_costs_nobody_behind_it_in_the_chain(first: LiveMode) -> None:
    """It keeps its place until it has everything: whoever is ordered once it has its first pieces is not sent the model
    by it as well."""
    orders = ((0.0, 0, LiveMode.WHOLE), (10.0, 1, first), (10.0, 2, LiveMode.WHOLE), (11.0, 3, LiveMode.WHOLE))
    assert loading_s(1, 4, orders)[1:] == pytest.approx([3.58] * 3, rel=0.03)


@pytest.mark.parametrize("first", [LiveMode.WHOLE, LiveMode.PAIR])
def test_who_comes_whole_beside_one_that_serves_early_waits_for_the_same_bytes(first: LiveMode) -> None:
    """A machine's memory has a model once, whoever of it asks."""
    orders = ((0.0, 0, LiveMode.WHOLE), (10.0, 1, first), (10.0, 1, LiveMode.WHOLE))
    assert loading_s(2, 2, orders)[1:] == pytest.approx([3.58] * 2, rel=0.03)


def test_of_those_that_come_as_pipelines_as_many_begin_over_others_as_there_are() -> None:
    three = Pair(LiveMode.PIPELINES, instances=3)
    three.run()
    assert len(three.recorder.records) == len(three.jobs) and not any(r.error for r in three.recorder.records)
    assert sorted(event.early for _, event in three.finished()) == [False, False, True]


def test_nobody_pairs_without_another_instance_or_with_one_layer() -> None:
    alone = Pair(LiveMode.PAIR)
    assert [event.early for _, event in alone.finished()] == [False]
    flat = replace(llama_8b(), shape=replace(llama_8b().shape, layers=1))
    pair = Pair(LiveMode.PAIR, spec=flat)
    pair.run()
    assert [event.early for _, event in pair.finished()] == [False, False]


def until_it_leans(pair: Pair) -> tuple[Engine, Engine]:
    """The engine that leans, and its peer; requests are there."""
    for job in pair.jobs:
        pair.world.front.arrive(job)
    while True:
        pair.world.queue.run_until(pair.world.queue.now_s + 0.05)
        leaning = [engine for engine in pair.engines() if engine._lean is not None]
        if leaning and leaning[0].running:
            (peer,) = [engine for engine in pair.engines() if engine is not leaning[0]]
            return leaning[0], peer


def test_a_leader_whose_peer_dies_waits_for_its_weights_and_goes_on() -> None:
    pair = Pair(LiveMode.PAIR)
    leader, peer = until_it_leans(pair)
    pair.world.nodes.lose_instance(peer.key)
    steps = leader.steps
    pair.world.queue.run_until(pair.world.queue.now_s + 0.3)
    assert leader.steps <= steps + 1  # the one that it was in
    pair.world.queue.run_until(120.0)
    assert leader._lean is None and leader.steps > steps + 1
    assert len(pair.recorder.records) == len(pair.jobs) and not any(r.error for r in pair.recorder.records)


def test_a_leader_that_is_told_to_leave_ends_with_its_loading() -> None:
    pair = Pair(LiveMode.PAIR)
    leader, peer = until_it_leans(pair)
    pair.world.nodes.lose_instance(leader.key)
    assert leader.key not in pair.world.nodes.instances
    pair.world.queue.run_until(120.0)
    assert len(pair.recorder.records) == len(pair.jobs) and not any(r.error for r in pair.recorder.records)
    assert [e for e in pair.engines() if e is peer]


def test_a_leaders_steps_lie_on_both_devices() -> None:
    pair = Pair(LiveMode.PAIR)
    leader, peer = until_it_leans(pair)
    own, other = leader.pools[0], peer.pools[0]
    loads: list[tuple[Any, Any]] = [(own._loads.get(leader._stint), other._loads.get(leader._stint))]
    assert all(load is not None for load in loads[0])
    held = leader._lean.held_share()  # type: ignore[union-attr]
    assert 0.0 < held < 1.0
    assert loads[0][0].compute == pytest.approx(loads[0][1].compute * held / (1.0 - held), rel=0.2)
