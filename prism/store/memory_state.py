"""Cluster state in one process's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from prism.core.ids import ModelName, NodeId
from prism.store.rates import refill, verdict
from prism.store.values import (
    FRONT_DEAD,
    AgentRecord,
    ControllerRecord,
    LeaseLost,
    PlacementChange,
    RateVerdict,
    Replica,
)


class MemoryState:
    """The state half of :class:`prism.store.memory.MemoryStore`. ``clock`` is monotonic seconds, for the lease."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self._placement: dict[ModelName, list[Replica]] = {}
        self._watchers: set[asyncio.Queue[PlacementChange]] = set()
        self._agents: dict[NodeId, AgentRecord] = {}
        self._fronts: dict[str, float] = {}
        self._lease: tuple[ControllerRecord, float] | None = None
        self._fence = 0
        self._generation = 0
        self._buckets: dict[str, tuple[float, float]] = {}
        self._counters: dict[str, float] = {}
        self._decisions: list[str] = []
        self._docs: dict[str, str] = {}

    async def placement(self) -> dict[ModelName, list[Replica]]:
        return dict(self._placement)

    async def set_placement(self, model: ModelName, replicas: Sequence[Replica], holder: ControllerRecord) -> None:
        if await self.controller() != holder:
            raise LeaseLost(f"controller {holder.id} (fence {holder.fence}) may not place {model}: its lease is lost")
        if replicas:
            self._placement[model] = list(replicas)
        else:
            self._placement.pop(model, None)
        for watcher in self._watchers:
            watcher.put_nowait(PlacementChange(model))

    async def watch_placement(self) -> AsyncIterator[PlacementChange]:
        changes: asyncio.Queue[PlacementChange] = asyncio.Queue()
        self._watchers.add(changes)
        try:
            yield PlacementChange(None)
            while True:
                yield await changes.get()
        finally:
            self._watchers.discard(changes)

    async def announce_agent(self, agent: AgentRecord) -> None:
        self._agents[agent.node] = agent

    async def remove_agent(self, node: NodeId) -> None:
        self._agents.pop(node, None)

    async def agents(self) -> list[AgentRecord]:
        return list(self._agents.values())

    async def announce_front(self, mailbox: str, seen_s: float) -> None:
        self._fronts[mailbox] = seen_s

    async def bury_front(self, mailbox: str) -> None:
        self._fronts[mailbox] = FRONT_DEAD

    async def remove_front(self, mailbox: str) -> None:
        self._fronts.pop(mailbox, None)

    async def fronts(self) -> dict[str, float]:
        return dict(self._fronts)

    async def acquire_lease(self, controller: str, mailbox: str, ttl_s: float) -> ControllerRecord | None:
        held = await self.controller()
        if held is not None and held.id != controller:
            return None
        if held is None:
            self._fence += 1
        record = ControllerRecord(id=controller, mailbox=mailbox, fence=self._fence)
        self._lease = (record, self._now() + ttl_s)
        return record

    async def renew_lease(self, holder: ControllerRecord, ttl_s: float) -> bool:
        if await self.controller() != holder:
            return False
        self._lease = (holder, self._now() + ttl_s)
        return True

    async def release_lease(self, holder: ControllerRecord) -> None:
        if await self.controller() == holder:
            self._lease = None

    async def controller(self) -> ControllerRecord | None:
        if self._lease is None or self._lease[1] <= self._now():
            return None
        return self._lease[0]

    async def catalog_generation(self) -> int:
        return self._generation

    async def bump_catalog_generation(self) -> int:
        self._generation += 1
        return self._generation

    async def rate_take(self, bucket: str, amount: int, per_minute: int, now_s: float) -> RateVerdict:
        level, at = self._buckets.get(bucket, (float(per_minute), now_s))
        level = refill(level, per_minute, now_s - at)
        allowed = amount <= 0 or level >= amount
        if allowed:
            level = min(per_minute, level - amount)
        self._buckets[bucket] = (level, now_s)
        return verdict(allowed, level, amount, per_minute)

    async def count(self, counters: Mapping[str, float]) -> None:
        for name, amount in counters.items():
            self._counters[name] = self._counters.get(name, 0.0) + amount

    async def counters(self, prefix: str = "") -> dict[str, float]:
        return {name: n for name, n in self._counters.items() if name.startswith(prefix)}

    async def append_decision(self, line: str, keep: int = 10_000) -> None:
        self._decisions = [line, *self._decisions[: keep - 1]]

    async def decisions(self, count: int = 100) -> list[str]:
        return self._decisions[:count]

    async def put_doc(self, name: str, document: str) -> None:
        self._docs[name] = document

    async def doc(self, name: str) -> str | None:
        return self._docs.get(name)
