"""One instance as its machine has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from prism.core.instances import InstanceKey, Part, Parts, queue_device
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.engine.api import Handle
from prism.scheduler.instance_life import InstanceLife


@dataclass(slots=True)
class LocalInstance:
    """The part of an instance that stands on this machine. Changed by :class:`Instances` only."""

    key: InstanceKey
    spec: ModelSpec
    part: Part
    parts: Parts
    """All of the instance's, this one among them."""
    elastic: bool
    """Its KV memory has no fixed share."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Weight servers of other machines, by machine."""
    life: InstanceLife = field(default_factory=InstanceLife)
    handle: Handle | None = None
    watcher: asyncio.Task[None] | None = None
    drained_by: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> InstanceState:
        return self.life.state

    @property
    def takes_requests(self) -> bool:
        """The queue of one of this machine's devices is the instance's."""
        return queue_device(self.parts) == self.part.lead
