"""Instances in the books: named by model and generation, charged by part, two generations of a model on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate, Deactivate, Route
from prism.core.events import (
    ActivationFinished,
    DeactivationFinished,
    DeviceReport,
    InstanceFound,
    InstanceLoad,
    OperatorUnload,
    WaitingRequests,
)
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, LayerRange, Part, Parts, Role, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelShape, ModelSpec
from prism.scheduler import cluster_scheduler
from prism.scheduler.books import Books
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import NoRoom, Room
from prism.scheduler.planning import view
from prism.scheduler.records import ModelRecord
from prism.scheduler.shares import shards_of
from prism.scheduler.survey import Survey
from tests.scheduler.cluster_world import model_spec
from tests.scheduler.exchange import node_devices

M = ModelName("m")
A0, A1, B0 = DeviceId("a/host:0"), DeviceId("a/host:1"), DeviceId("b/host:0")
OLD, NEW = InstanceKey(M, Generation(1)), InstanceKey(M, Generation(2))
SPEC = replace(model_spec("m", 300), shape=ModelShape(10, 64, 4, 2, 16, 128, 100), min_kv_bytes=500_000)


def fleet_with(spec: ModelSpec, make_policy: type[ClusterPolicy] | None = None) -> ClusterScheduler:
    settings = ClusterSettings(rebalance_every_s=0.0)
    scheduler = (
        cluster_scheduler(settings, [spec]) if make_policy is None else ClusterScheduler(settings, [spec], make_policy)
    )
    scheduler.books.fleet.add_devices([*node_devices("a", 2, 10**6), *node_devices("b", 1, 10**6)])
    return scheduler


def test_two_generations_of_a_model_stand_on_one_device_for_a_moment() -> None:
    scheduler = fleet_with(model_spec("m", 300))
    books = scheduler.books
    for key in (OLD, NEW):
        scheduler.on_event(InstanceFound(key, whole_model([A0])), 0.0)
    assert list(books.fleet.devices[A0].instances) == [OLD, NEW]
    assert books.fleet.board.shared[0] == 10**6 - 600, "both are charged"
    loads = (InstanceLoad(OLD, 300, 90, 0, 3, 0), InstanceLoad(NEW, 300, 40, 0, 1, 2))
    scheduler.on_event(DeviceReport(A0, 10**6, 0, loads), 1.0)
    assert [(i.running, i.waiting, i.kv_bytes) for i in books.loaded.values()] == [(3, 0, 90), (1, 2, 40)]
    shown = {i.generation: (i.running, i.waiting) for m in view(scheduler, 1.0).models for i in m.instances}
    assert shown == {1: (3, 0), 2: (1, 2)}
    effects = scheduler.on_event(DeactivationFinished(OLD), 2.0)
    assert Route(M, (A0,)) in effects, "the new one goes on serving"
    assert list(books.fleet.devices[A0].instances) == [NEW] and books.fleet.board.shared[0] == 10**6 - 300


def test_the_shares_of_a_part_follow_its_layers_and_ranks() -> None:
    stages: Parts = (
        Part((A0, A1), LayerRange(0, 8), Role.STAGE),
        Part((B0,), LayerRange(8, 10), Role.STAGE),
    )
    shards = shards_of(stages, SPEC, min_kv_tokens=2048)
    assert [(d, s.weight_bytes, s.min_kv_bytes) for d, s in shards.items()] == [
        (A0, 120, 200_000),
        (A1, 120, 200_000),
        (B0, 60, 100_000),
    ]
    apart: Parts = (Part((A0,), role=Role.PREFILL), Part((B0,), role=Role.DECODE))
    assert {d: s.weight_bytes for d, s in shards_of(apart, SPEC, 2048).items()} == {A0: 300, B0: 300}


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_whole_model_has_the_shares_of_its_ranks(tp: int) -> None:
    spec = replace(SPEC, tp=tp, weight_bytes=1001)
    books = Books(ClusterSettings())
    for shard in shards_of(whole_model([A0, A1, DeviceId("a/host:2")][:tp]), spec, 2048).values():
        assert (shard.weight_bytes, shard.min_kv_bytes) == (spec.shard_weight_bytes, books.shard_kv_bytes(spec))


class StagesOnTwoMachines(ClusterPolicy):
    """What a policy of stages will look like: a file beside the others."""

    parts: Parts = (Part((A1,), LayerRange(0, 8), Role.STAGE), Part((B0,), LayerRange(8, 10), Role.STAGE))

    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        return Room(self.parts)


def test_an_instance_of_parts_on_two_machines_lives_and_leaves() -> None:
    scheduler = fleet_with(SPEC, StagesOnTwoMachines)
    fleet = scheduler.books.fleet
    (order,) = scheduler.on_event(WaitingRequests(M, 1, 0.0), 0.0)
    assert isinstance(order, Activate) and order.parts == StagesOnTwoMachines.parts
    assert [10**6 - int(free) for free in fleet.board.shared] == [0, 240, 60]
    assert scheduler.on_event(ActivationFinished(order.key, 1.0), 1.0) == [Route(M, (A1,))], "the first part's lead"
    load = InstanceLoad(order.key, 240, 10, 0, 4, 0)
    scheduler.on_event(DeviceReport(A1, 10**6, 0, (load,)), 2.0)
    scheduler.on_event(DeviceReport(B0, 10**6, 0, (load._replace(running=0),)), 2.0)
    (instance,) = scheduler.books.loaded.values()
    assert instance.running == 4, "only the queue's device says what runs"
    scheduler.on_event(WaitingRequests(M, 0, float("inf")), 2.0)
    effects = scheduler.on_event(OperatorUnload(M), 3.0)
    assert effects == [Route(M, ()), Deactivate(order.key, order.parts, False, because(ReasonCode.OPERATOR))]
    scheduler.on_event(DeactivationFinished(order.key), 4.0)
    assert not scheduler.books.loaded and fleet.board.shared.tolist() == [10**6] * 3
