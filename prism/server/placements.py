"""Where models are, as this front door knows it: a cache of the store's placement, and the choice of a queue."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from prism.core.ids import ModelName
from prism.store.interface import Store
from prism.store.values import Replica, StoreError
from prism.wire import keys

log = logging.getLogger(__name__)


class Placements:
    """Follows the placement and the lengths of all queues. A stale view is harmless: an agent that no longer has the
    model sends the request back to the inactive queue."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._replicas: dict[ModelName, list[Replica]] = {}
        self._lengths: dict[str, int] = {}
        self._sent: Counter[str] = Counter()
        self.known = asyncio.Event()
        """Set once the placement was read for the first time."""

    def replicas(self, model: ModelName) -> Sequence[Replica]:
        return self._replicas.get(model, ())

    def all(self) -> Mapping[ModelName, Sequence[Replica]]:
        return self._replicas

    def state(self, model: ModelName) -> str:
        """The most useful state among the model's replicas; ``inactive`` without any."""
        states = {replica.state for replica in self.replicas(model)}
        return next((s for s in ("ready", "loading", "draining") if s in states), next(iter(states), "inactive"))

    def device_of(self, model: ModelName) -> str:
        """First device of a ready replica; empty without one."""
        return next((replica.devices[0] for replica in self.replicas(model) if replica.state == "ready"), "")

    def choose(self, model: ModelName) -> str:
        """The queue for a new request: of the ready replica whose queue is shortest, else the inactive queue."""
        queues = [keys.device_queue(replica.devices[0]) for replica in self.replicas(model) if replica.state == "ready"]
        if not queues:
            return keys.INACTIVE_QUEUE
        chosen = min(queues, key=lambda queue: self._lengths.get(queue, 0) + self._sent[queue])
        self._sent[chosen] += 1
        return chosen

    @property
    def waiting(self) -> int:
        """Unfinished requests in all queues, as of the last look, plus those sent since."""
        return sum(self._lengths.values()) + self._sent.total()

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
            if not self._sent and not any(self._lengths.values()):
                continue
            devices = {replica.devices[0] for replicas in self._replicas.values() for replica in replicas}
            queues = [keys.INACTIVE_QUEUE, *(keys.device_queue(device) for device in sorted(devices))]
            try:
                lengths = await self._store.lengths(queues)
            except StoreError as error:
                log.warning("queue lengths could not be read: %s", error)
                continue
            self._lengths = dict(zip(queues, lengths, strict=True))
            self._sent.clear()
