"""What a further instance would have in time that is not in time without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.events import DeviceReport, InstanceLoad
from prism.core.ids import ModelName
from prism.core.views import InstanceState
from prism.scheduler.gains import Gains
from prism.scheduler.replica_load import ReplicaLoad
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.test_relief import GB, HERE, SETTINGS, gpu

MODEL = ModelName("m")


@pytest.mark.parametrize(
    ("running", "waiting", "waited_s", "served_a_second", "share"),
    [
        (4, 0, 0.0, 4, 0.0),
        (4, 4, 0.1, 4, 0.0),
        (4, 4, 5.0, 4, 0.5),
        (4, 200, 5.0, 4, 1.0),
    ],
    ids=["nobody waits", "nobody for long", "nobody will be late", "some will be late"],
)
def test_who_waits_is_half_lost_and_who_will_be_late_all(
    running: int, waiting: int, waited_s: float, served_a_second: int, share: float
) -> None:
    """With ten seconds for a first token."""
    w = World(replace(SETTINGS, max_replicas=1), [model_spec(MODEL, 16 * GB, slo_ttft_s=10.0, min_kv_bytes=GB)])
    w.join(gpu(HERE))
    w.arrive(MODEL)
    w.pass_time(0.6)
    w.step()
    (key,) = w.live
    books = w.scheduler.books
    load, model = ReplicaLoad(books), books.models[MODEL]
    for second in range(60):
        w.arrive(MODEL, served_a_second)
        last = second == 59
        waits = (waiting, waited_s) if last else (0, 0.0)
        one = InstanceLoad(
            key, 16 * GB, GB // 5, 0, running, waits[0], served_a_second * (second + 1), waited_s=waits[1]
        )
        w.send(DeviceReport(HERE, 80 * GB, 0, (one,)))
        load.observe(model, model.in_state(InstanceState.READY), w.now)
        w.pass_time(1.0)
    one_of_two = Gains(books, load).further(model, 2, w.now)
    assert one_of_two.rate_per_s == pytest.approx(served_a_second / 2, rel=0.2)
    assert one_of_two.gained_per_s == pytest.approx(share * one_of_two.rate_per_s)
