"""What agents report per device, as operators see it per instance and per device."""

from __future__ import annotations

from typing import Any

from prism.core.ids import DeviceId, Generation
from prism.core.instances import whole_model
from prism.core.views import InstanceState
from prism.server.views import _device, _measured, _replicas
from prism.store.values import Replica


def reported(*devices: str, running: int) -> dict[str, Any]:
    """An agent's report of its part of an instance: 500 bytes of weights and 100 of KV on each of ``devices``."""
    numbers = {"weight_bytes": 500, "kv_bytes": 100, "running": running, "waiting": 0}
    return {"model": "m", "generation": 1, "devices": list(devices), "state": "ready", **numbers}


def shown(*reports: dict[str, Any]) -> dict[str, Any]:
    parts = whole_model([DeviceId("a/host:0"), DeviceId("a/host:1")])
    placed = [Replica(parts=parts, state=InstanceState.READY, generation=Generation(1))]
    [row] = _replicas("m", placed, {}, _measured(reports), {}, {})
    return row


def test_an_instance_on_two_devices_holds_what_both_hold() -> None:
    row = shown(reported("a/host:0", "a/host:1", running=3))
    assert (row["weight_bytes"], row["kv_bytes"], row["running"]) == (1000, 200, 3)


def test_an_instance_on_two_machines_is_what_both_agents_say() -> None:
    row = shown(reported("a/host:0", running=3), reported("b/host:0", running=0))
    assert (row["weight_bytes"], row["kv_bytes"], row["running"]) == (1000, 200, 3)


def test_what_an_instance_has_outside_of_its_devices_is_told_once_for_all_of_them() -> None:
    outside = {"borrowed_bytes": 30, "long_host_bytes": 40, "long_lent_bytes": 20}
    row = shown(reported("a/host:0", "a/host:1", running=1) | outside)
    assert {key: row[key] for key in outside} == outside


def test_a_device_shows_its_own_part_of_an_instance() -> None:
    device = {"id": "a/host:1", "node": "a", "capacity_bytes": 2000, "free_bytes": 1400, "weight_bytes": 500}
    cluster = {"instances": [reported("a/host:0", "a/host:1", running=3)]}
    row = _device({**device, "draining": False, "weighted_rate": 0.0}, cluster)
    assert (row["weight_bytes"], row["kv_bytes"]) == (500, 100)
    assert row["engines"]["active"] == 1
