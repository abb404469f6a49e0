"""Where further instances of a model come, judged by what their neighbours lose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate
from prism.core.events import DeviceReport, InstanceLoad
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.test_relief import GB, HERE, SETTINGS, THERE, gpu

GROWING, NEIGHBOUR = ModelName("growing"), ModelName("neighbour")


def grown(neighbours_tpot_s: float, waited_s: float, arrivals: int) -> list[ReasonCode]:
    """Why instances came of a model that runs more than one should, of which so many requests came within a second:
    they have waited so long, or all have their tokens in time. On the other device is a neighbour that is asked all the
    time and runs nothing at this moment."""
    specs = [
        model_spec(GROWING, 16 * GB, slo_tpot_s=0.03, min_kv_bytes=GB),
        model_spec(NEIGHBOUR, 16 * GB, slo_tpot_s=neighbours_tpot_s, min_kv_bytes=GB),
    ]
    w = World(replace(SETTINGS, rebalance_every_s=0.0, max_replicas=2), specs)
    for device, name in ((HERE, GROWING), (THERE, NEIGHBOUR)):
        w.join(gpu(device))
        w.arrive(name)
        w.pass_time(0.6)
        w.step()
    keys = {key.model: key for key in w.live}

    def report(model: ModelName, running: int, waiting: int = 0) -> None:
        load = InstanceLoad(keys[model], 16 * GB, running * GB // 2, 0, running, waiting, 9, waited_s=waited_s)
        w.send(DeviceReport(w.live[keys[model]].devices[0], 80 * GB, 0, (load,)))

    for running in [4] * 40 + [0]:
        w.arrive(NEIGHBOUR)
        report(NEIGHBOUR, running)
        w.pass_time(1.0)
    for _ in range(3):
        for _ in range(arrivals):
            w.arrive(GROWING)
        report(GROWING, 80, 4 if waited_s else 0)
    return [e.reason.code for _, e in w.log if isinstance(e, Activate) and e.reason.code is not ReasonCode.DEMAND]


@pytest.mark.parametrize(
    ("neighbours_tpot_s", "waited_s", "arrivals", "comes"),
    [(0.012, 0.0, 1, False), (0.1, 0.0, 1, True), (0.012, 5.0, 1, True), (0.012, 0.0, 20, True)],
    ids=["neighbour-would-be-late", "neighbour-has-time", "requests-wait", "they-will-wait"],
)
def test_one_whose_requests_are_all_in_time_may_cost_its_neighbours_nothing(
    neighbours_tpot_s: float, waited_s: float, arrivals: int, comes: bool
) -> None:
    assert grown(neighbours_tpot_s, waited_s, arrivals) == [ReasonCode.SCALE_OUT] * comes
