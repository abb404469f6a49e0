"""One instance as its machine has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prism.core.ids import DeviceId, node_of
from prism.core.instances import InstanceKey, Part, Parts, queue_device
from prism.core.settings import LiveMode
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.engine.api import Handle
from prism.policy.live.routes import Company
from prism.scheduler.instance_life import InstanceLife
from prism.wire.commands import ActivateCommand


@dataclass(frozen=True, slots=True)
class LiveBeginning:
    """How an instance begins that may serve before its weights are there."""

    mode: LiveMode = LiveMode.WHOLE
    company: Mapping[InstanceKey, Company] = field(default_factory=dict)
    """Other instances of the model, as they were known when this one was ordered."""
    nodes: frozenset[str] = frozenset()
    """The machines of these."""
    pipeline: int = 0
    turn: int = 0
    turns: int = 1
    leads: bool = True
    """See :class:`prism.wire.commands.ActivateCommand`."""

    @classmethod
    def ordered(cls, order: ActivateCommand) -> LiveBeginning:
        company = {
            companion.key: Company.OTHER
            if companion.pipeline is None
            else Company.PIPELINE
            if companion.pipeline == order.pipeline
            else Company.DECISION
            for companion in order.companions
        }
        nodes = frozenset(node_of(DeviceId(companion.device)) for companion in order.companions)
        return cls(order.live, company, nodes, order.pipeline, order.turn, order.turns, order.leads)

    @property
    def pipelined(self) -> bool:
        """It is to serve with those that come with it."""
        return self.mode is LiveMode.PIPELINES and any(c is not Company.OTHER for c in self.company.values())

    @property
    def waits_for_company(self) -> bool:
        """It does not begin before its pipeline has all layers: as many of those that come together as there are others
        begin over one of these, the first of each pipeline."""
        others = sum(c is Company.OTHER for c in self.company.values())
        return self.pipelined and (self.turn > 0 or self.pipeline >= others)


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
    begins: LiveBeginning = field(default_factory=LiveBeginning)
    came_whole: bool = False
    """Its engine was to begin with some pieces, and waited for all: it cannot run them apart."""
    whole_only: str = ""
    """Why no engine of the model runs layers for others, or has others run its own, as one of them said."""
    life: InstanceLife = field(default_factory=InstanceLife)
    ordered_s: float = field(default_factory=time.monotonic)
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
