"""Spare instances leave where their neighbours need the bandwidth, and only then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from prism.core.effects import Deactivate
from prism.core.events import DeviceReport, InstanceLoad, OperatorLoad
from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.test_relief import GB, HERE, SETTINGS, THERE, gpu

SPREAD, NEIGHBOUR = ModelName("spread"), ModelName("neighbour")


@dataclass(frozen=True)
class Load:
    """What is reported second by second once the model has two instances, one of them beside the neighbour."""

    neighbours_tpot_s: float = 0.027
    """A step takes 0.016 s alone, 0.026 s beside an engine of 16 GB."""
    waited_s: float = 5.0
    """The neighbour's requests."""
    own_waited_s: float = 0.0
    """Its own, on both instances."""
    spare_waited_s: float = 0.0
    """On the spare one only."""
    arrivals: int = 1
    """A second."""
    running: int = 4
    """On each instance."""
    kv_bytes: int = GB // 20
    """Of a request."""
    own_tpot_s: float = 0.1
    asked_by_operator: bool = False


def left(load: Load) -> list[tuple[InstanceKey, Reason]]:
    """Instances that left, and why."""
    w = World(
        replace(SETTINGS, rebalance_every_s=0.0, max_replicas=2),
        [
            model_spec(SPREAD, 16 * GB, slo_tpot_s=load.own_tpot_s, min_kv_bytes=GB),
            model_spec(NEIGHBOUR, 30 * GB, slo_tpot_s=load.neighbours_tpot_s, min_kv_bytes=GB),
        ],
    )
    w.join(gpu(HERE, 40))
    w.arrive(SPREAD)
    w.join(gpu(THERE))
    w.pass_time(0.6)
    w.step()
    (home,) = w.live

    def spread(key: InstanceKey, running: int, waited_s: float) -> InstanceLoad:
        waiting = 4 if waited_s else 0
        return InstanceLoad(key, 16 * GB, running * load.kv_bytes, 0, running, waiting, 9, waited_s=waited_s)

    def report(running: int, waited_s: float) -> None:
        w.send(DeviceReport(HERE, 40 * GB, 0, (spread(home, running, waited_s),)))

    for waited_s in [0.0] * 60 + [5.0]:
        w.arrive(SPREAD)
        report(4, waited_s)
        w.pass_time(0.5)
    (spare,) = w.live.keys() - {home}
    w.activated(spare)
    w.send(OperatorLoad(NEIGHBOUR, (THERE,)))
    (neighbour,) = w.live.keys() - {home, spare}
    w.activated(neighbour)
    if load.asked_by_operator:
        w.send(OperatorLoad(SPREAD, (), 2))
    for _ in range(60):
        w.arrive(SPREAD)
        w.arrive(NEIGHBOUR)
        report(4, 0.0)
        w.pass_time(0.5)
    for _ in range(60):
        w.arrive(SPREAD, load.arrivals)
        w.arrive(NEIGHBOUR)
        report(load.running, load.own_waited_s)
        both = (
            InstanceLoad(neighbour, 30 * GB, GB // 5, 0, 4, 4, 9, waited_s=load.waited_s),
            spread(spare, load.running, load.own_waited_s or load.spare_waited_s),
        )
        w.send(DeviceReport(THERE, 80 * GB, 0, both))
        w.pass_time(0.5)
    return [(e.key, e.reason) for _, e in w.log if isinstance(e, Deactivate)]


def test_a_spare_instance_leaves_where_others_wait_for_its_bandwidth() -> None:
    ((key, reason),) = left(Load())
    assert key.model == SPREAD
    assert dict(reason.numbers)["waiting"] == 4
    assert dict(reason.numbers)["load"] > 1.0


def test_it_leaves_where_only_its_own_requests_wait() -> None:
    """All of them would be taken at once where it is not."""
    assert [key.model for key, _ in left(Load(waited_s=0.01, spare_waited_s=5.0))] == [SPREAD]


@pytest.mark.parametrize(
    "load",
    [
        Load(waited_s=0.01),
        Load(neighbours_tpot_s=0.1),
        Load(own_waited_s=5.0, neighbours_tpot_s=0.022),
        Load(arrivals=20),
        Load(running=3400, kv_bytes=GB // 500, neighbours_tpot_s=0.024),
        Load(neighbours_tpot_s=0.022, waited_s=0.0, arrivals=20, running=20, kv_bytes=GB // 2, own_tpot_s=0.0185),
        Load(asked_by_operator=True),
    ],
    ids=[
        "neighbours hardly wait",
        "neighbours bear it",
        "its own requests wait",
        "its burst grows",
        "the other has no time for all",
        "the other's tokens would be too slow as well",
        "an operator wants it",
    ],
)
def test_else_it_stays(load: Load) -> None:
    assert left(load) == []


def test_where_tokens_come_too_slowly_it_leaves_though_nobody_waits() -> None:
    ((_, reason),) = left(Load(neighbours_tpot_s=0.022, waited_s=0.0))
    assert dict(reason.numbers)["waiting"] == 0
