"""What an instance is: a key, and parts that stand on devices.

An instance of a model is one or more *parts*. A part is one group of engine processes that work in step on devices of
one machine (tensor-parallel ranks); it runs all layers of the model or a range of them, in a role. An instance as it is
today has one part that runs everything::

    whole, tp=2          stages                          prefill and decode apart
    +-----------+        +-----------+  +-----------+    +-----------+  +-----------+
    | a/0  a/1  |        | a/0  0:16 |->| b/0 16:32 |    | a/0  a/1  |=>| b/0  b/1  |
    +-----------+        +-----------+  +-----------+    +-----------+  +-----------+
      whole                stage          stage            prefill        decode

Devices stand in rank order, parts in the order in which a request meets them: the first part's :attr:`Part.lead` is the
device whose queue takes the instance's requests (:func:`queue_device`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId, Generation, ModelName, NodeId, node_of


class InstanceKey(NamedTuple):
    """The name of one instance. Generations of a model never repeat in a fleet's life."""

    model: ModelName
    generation: Generation

    def __str__(self) -> str:
        return f"{self.model}#{self.generation}"


class Role(StrEnum):
    """What a part does for the instance's requests."""

    WHOLE = "whole"
    """All of a request: prefill and decode, over the part's layers, which are all of the model's."""
    PREFILL = "prefill"
    """The prompt; the KV it makes goes to the decode part."""
    DECODE = "decode"
    """Every token after the first."""
    STAGE = "stage"
    """Some of the layers, of prefill and of decode."""


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """The model's layers from ``first`` up to, not including, ``end`` (counted from 0)."""

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise InvalidValue("layers", str(self), "must be FIRST:END with 0 <= FIRST < END")

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


@dataclass(frozen=True, slots=True)
class Part:
    """One group of ranks on one machine. Raises :class:`InvalidValue` when ``devices`` are none, repeat, or stand on
    several machines."""

    devices: tuple[DeviceId, ...]
    """In rank order."""
    layers: LayerRange | None = None
    """None: all of the model's."""
    role: Role = Role.WHOLE

    def __post_init__(self) -> None:
        one_machine = len({node_of(device) for device in self.devices}) == 1
        if not one_machine or len(set(self.devices)) < len(self.devices):
            raise InvalidValue(
                "devices", ", ".join(self.devices), "a part needs one or more different devices, all of one machine"
            )

    @property
    def lead(self) -> DeviceId:
        """The device of rank 0, which speaks for the part."""
        return self.devices[0]

    @property
    def node(self) -> NodeId:
        return node_of(self.lead)

    def as_dict(self) -> dict[str, object]:
        """For logs and operators' views."""
        layers = None if self.layers is None else str(self.layers)
        return {"devices": list(self.devices), "layers": layers, "role": self.role.value}

    @property
    def is_whole_model(self) -> bool:
        """It serves requests without any other part."""
        return self.role is Role.WHOLE and self.layers is None


Parts = tuple[Part, ...]
"""The parts of one instance, in the order in which a request meets them; never empty."""


def whole_model(devices: Iterable[DeviceId]) -> Parts:
    """The parts of an instance that is one tensor-parallel group on ``devices`` (in rank order)."""
    return (Part(tuple(devices)),)


def devices_of(parts: Iterable[Part]) -> tuple[DeviceId, ...]:
    """All devices of the parts, part by part in rank order."""
    return tuple(device for part in parts for device in part.devices)


def queue_device(parts: Sequence[Part]) -> DeviceId:
    """The device whose queue takes the instance's requests: the lead of its first part."""
    return parts[0].lead


def parts_by_node(parts: Iterable[Part]) -> dict[NodeId, Parts]:
    """The parts that stand on each machine, machines in the order in which they first occur."""
    found: dict[NodeId, Parts] = {}
    for part in parts:
        found[part.node] = (*found.get(part.node, ()), part)
    return found
