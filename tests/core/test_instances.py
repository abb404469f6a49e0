"""Keys, parts and what is asked of them."""

from __future__ import annotations

import msgspec
import pytest

from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId, Generation, ModelName, NodeId, device_id, kind_and_index, local_name, node_of
from prism.core.instances import (
    InstanceKey,
    LayerRange,
    Part,
    Parts,
    Role,
    devices_of,
    parts_by_node,
    queue_device,
    whole_model,
)

A0, A1, B0, B1 = (DeviceId(name) for name in ("a/cuda:0", "a/cuda:1", "b/cuda:0", "b/cuda:1"))


def test_a_device_knows_its_machine_and_its_name_there() -> None:
    device = device_id(NodeId("rack-3"), "cuda", 12)
    assert (node_of(device), local_name(device)) == (NodeId("rack-3"), "cuda:12")
    assert kind_and_index(local_name(device)) == ("cuda", 12)


@pytest.mark.parametrize("name", ["cuda", "cuda:", "cuda:x"])
def test_a_name_without_a_number_is_no_device(name: str) -> None:
    with pytest.raises(ValueError):
        kind_and_index(name)


def test_a_key_is_a_pair_and_reads_well() -> None:
    key = InstanceKey(ModelName("m"), Generation(7))
    assert key == (ModelName("m"), Generation(7))
    assert str(key) == "m#7"


def test_a_tensor_parallel_instance_is_one_part_that_runs_everything() -> None:
    [part] = whole_model([A1, A0])
    assert (part.lead, part.node, part.layers, part.role) == (A1, NodeId("a"), None, Role.WHOLE)
    assert part.is_whole_model
    assert devices_of([part]) == (A1, A0)


def test_a_pipeline_is_asked_through_its_first_part() -> None:
    parts = (Part((A0, A1), LayerRange(0, 16), Role.STAGE), Part((B0, B1), LayerRange(16, 32), Role.STAGE))
    assert queue_device(parts) == A0
    assert devices_of(parts) == (A0, A1, B0, B1)
    assert not any(part.is_whole_model for part in parts)


def test_a_part_of_the_layers_is_not_the_model() -> None:
    assert not Part((A0,), LayerRange(0, 16)).is_whole_model
    assert not Part((A0,), role=Role.PREFILL).is_whole_model


def test_parts_go_to_the_machines_they_stand_on() -> None:
    first, second, third = Part((A0,), role=Role.PREFILL), Part((B0,), role=Role.DECODE), Part((A1,), role=Role.DECODE)
    assert parts_by_node([first, second, third]) == {"a": (first, third), "b": (second,)}


@pytest.mark.parametrize("devices", [(), (A0, A0), (A0, B0)])
def test_a_part_stands_on_different_devices_of_one_machine(devices: tuple[DeviceId, ...]) -> None:
    with pytest.raises(InvalidValue, match="one machine"):
        Part(devices)


@pytest.mark.parametrize(("first", "end"), [(-1, 3), (2, 2), (5, 3)])
def test_a_range_has_at_least_one_layer(first: int, end: int) -> None:
    with pytest.raises(InvalidValue, match="layers"):
        LayerRange(first, end)


def test_parts_cross_the_wire() -> None:
    parts = (Part((A0,), LayerRange(0, 16), Role.STAGE), Part((B0,), LayerRange(16, 32), Role.STAGE))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parts), type=Parts) == parts
