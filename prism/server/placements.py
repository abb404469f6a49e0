"""Where models are, as this front door knows it: a cache of the store's placement, and the choice of a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from prism.core.ids import ModelName
from prism.core.views import InstanceState
from prism.store.interface import Store
from prism.store.values import Replica, StoreError
from prism.wire import keys

log = logging.getLogger(__name__)


MOST_USEFUL: Final = (
    InstanceState.READY,
    InstanceState.LOADING,
    InstanceState.DRAINING,
    InstanceState.WAITING,
)
"""To those who ask what state a model is in."""


class Placements:
    """Follows the placement and the lengths of all queues. A stale view is harmless: an agent that no longer has the
    model sends the request back to the inactive queue."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._replicas: dict[ModelName, list[Replica]] = {}
        self._measured = 0
        """Entries of all queues, as of the last look."""
        self._sent = 0
        """Requests since then."""
        self.known = asyncio.Event()
        """Set once the placement was read for the first time."""

    def replicas(self, model: ModelName) -> Sequence[Replica]:
        return self._replicas.get(model, ())

    def all(self) -> Mapping[ModelName, Sequence[Replica]]:
        return self._replicas

    def state(self, model: ModelName) -> str:
        """The most useful state among the model's replicas; ``inactive`` without any."""
        states = {replica.state for replica in self.replicas(model)}
        return next((s.value for s in MOST_USEFUL if s in states), "inactive")

    def device_of(self, model: ModelName) -> str:
        """The device whose queue takes the requests of a ready replica; empty without one."""
        return next((replica.queue_device for replica in self.replicas(model) if replica.ready), "")

    def queues_for_one(self, model: ModelName) -> list[str]:
        """Where a new request may stand, which counts from now on: the queues of ready replicas, the least loaded of
        which takes it (:mod:`prism.policy.routing`); else the inactive queue."""
        self._sent += 1
        ready = [keys.device_queue(replica.queue_device) for replica in self.replicas(model) if replica.ready]
        return ready or [keys.INACTIVE_QUEUE]

    @property
    def waiting(self) -> int:
        """Unfinished requests in all queues, as of the last look, plus those sent since."""
        return self._measured + self._sent

    async def follow(self) -> None:
        """Keeps the cache current until cancelled."""
        async for _ in self._store.watch_placement():
            await self._reload()

    async def _reload(self) -> None:
        try:
            self._replicas = await self._store.placement()
        except StoreError as error:
            log.warning("the placement could not be read: %s", error)
            return
        self.known.set()

    async def measure(self, every_s: float = 0.25) -> None:
        """Keeps the queue lengths current until cancelled; asks only while requests are being sent."""
        while True:
            await asyncio.sleep(every_s)
            if not self.waiting:
                continue
            devices = sorted({replica.queue_device for replicas in self._replicas.values() for replica in replicas})
            queues = [keys.INACTIVE_QUEUE, *(keys.device_queue(device) for device in devices)]
            try:
                lengths = await self._store.lengths(queues)
            except StoreError as error:
                log.warning("queue lengths could not be read: %s", error)
                continue
            self._measured, self._sent = sum(lengths), 0
