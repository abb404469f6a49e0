"""Identifiers are their own types, so that a model name is never passed where a device is meant."""

from __future__ import annotations

from typing import NewType

ModelName = NewType("ModelName", str)
"""The name a model has in the catalog, never an alias."""

NodeId = NewType("NodeId", str)
"""One machine. Unique in the fleet and stable over restarts of its agent."""

DeviceId = NewType("DeviceId", str)
"""``NODE/KIND:INDEX``, for example ``local/cuda:0`` or ``local/host:1``; unique in the fleet."""

EngineId = NewType("EngineId", str)
"""One engine worker process; a restarted worker gets a new id."""

RequestId = NewType("RequestId", str)
"""One inference request (one choice of one HTTP call); unique for ever."""

Generation = NewType("Generation", int)
"""Counts the changes of one object's state. An effect carries the generation it was decided on, and its owner
refuses the effect when the generation has moved on (views are stale)."""


def device_id(node: NodeId, kind: str, index: int) -> DeviceId:
    """The id of device ``index`` of ``kind`` (``cuda`` or ``host``) on ``node``."""
    return DeviceId(f"{node}/{kind}:{index}")


def node_of(device: DeviceId) -> NodeId:
    """The machine the device belongs to: ``local`` for ``local/host:1``. Nothing else takes a device's id apart."""
    return NodeId(device.rpartition("/")[0])


def local_name(device: DeviceId) -> str:
    """The device's name on its own machine: ``host:1`` for ``local/host:1``."""
    return device.rpartition("/")[2]


def kind_and_index(local: str) -> tuple[str, int]:
    """A device's kind and number, from its name on its own machine: ``("host", 1)`` for ``host:1``. Raises
    :class:`ValueError` on anything else."""
    kind, _, index = local.partition(":")
    return kind, int(index)
