"""What an agent's gauges say."""

from __future__ import annotations

from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics, render


def test_a_device_out_of_service_shows_until_it_is_back() -> None:
    devices = [DeviceSpec(DeviceId(f"n/cuda:{i}"), NodeId("n"), DeviceKind.CUDA, 1 << 30) for i in range(2)]
    metrics = Metrics()
    measures = NodeMeasures(metrics, devices)
    for broken, shown in (({devices[1].id: "fell off the bus"}, "1"), ({}, "0")):
        measures.faults(broken)
        text = render(metrics).decode()
        assert 'prism_device_fault{device="n/cuda:0"} 0' in text
        assert f'prism_device_fault{{device="n/cuda:1"}} {shown}' in text
