"""The shell around one device: its queue and engines, what its scheduler hears of both, and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from prism.core.device_events import EngineDown, EngineDraining, EngineLoad, EngineUp, GpuEvent, MemoryReport
from prism.core.events import Tick
from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceSpec
from prism.engine import events as engine_events
from prism.engine.api import Handle
from prism.node.desk import RequestDesk
from prism.node.holding import HeldSteps
from prism.node.intake import QueueReader
from prism.node.measures import LongCounts
from prism.node.services import NodeServices
from prism.scheduler.gpu import GpuScheduler, InstanceCounts, InstanceTimes
from prism.store.values import StoreUnavailable
from prism.wire import keys

TICK_S: Final = 0.05
TELL_S: Final = 0.1
"""Between two looks at how many requests run, which whoever chooses a queue asks."""


class DeviceShell:
    """:meth:`run` serves until cancelled. ``memory`` says what the device has left; all methods are called on the
    agent's loop and none blocks."""

    def __init__(
        self, spec: DeviceSpec, settings: GpuSettings, memory: Callable[[], MemoryReport], services: NodeServices
    ) -> None:
        self.device, self.kind, self.pace, self.page_bytes = spec.id, spec.kind, spec.pace, max(1, spec.page_bytes)
        self.scheduler = GpuScheduler(spec.id, settings, spec.kind)
        self.desk = RequestDesk(self.scheduler, services)
        self._intake = QueueReader(
            services.store, keys.device_queue(spec.id), services.consumer, self.desk.ledger, self.desk.admit
        )
        self._memory, self._services = memory, services
        self._holding = HeldSteps(self.scheduler, self.desk.handles, services.measures, services.now_s)
        self._last_memory: MemoryReport | None = None

    async def run(self) -> None:
        """Takes over what an earlier agent of this device left, then serves."""
        await self._intake.take_over()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._intake.run())
            group.create_task(self._watch_time())
            group.create_task(self._tell_running())
            group.create_task(self._holding.run())

    async def _tell_running(self) -> None:
        """Says in the store how many of the queue's requests engines run, whenever that has changed."""
        queue, told = keys.device_queue(self.device), -1
        while True:
            if (running := self.desk.requests.running_total) != told:
                try:
                    await self._services.store.tell_running(queue, running)
                    told = running
                except StoreUnavailable:
                    told = -1  # a store that lost its data has forgotten it
            await asyncio.sleep(TELL_S)

    def feed(self, event: GpuEvent) -> None:
        """One event into the scheduler, its effects out."""
        self.desk.feed(event)

    # --- engines ---

    def engine_up(self, handle: Handle, up: EngineUp) -> None:
        """``handle`` serves; its events are consumed by :meth:`consume`."""
        self.desk.handles[up.key] = handle
        self.desk.requests.came_up(up.key.model, self._services.clock_s())
        self.feed(up)
        self._holding.begin(handle)

    def stop_admitting(self, key: InstanceKey) -> None:
        """The instance leaves: what waits goes back to the inactive queue (unless another instance of the model is
        here), what runs may finish."""
        self.feed(EngineDraining(key))

    def engine_down(self, key: InstanceKey) -> None:
        """The engine is gone."""
        self.desk.handles.pop(key, None)
        self.feed(EngineDown(key))
        self._holding.end(key)
        self.desk.lose_all(key)

    async def consume(self, key: InstanceKey, handle: Handle) -> engine_events.Died | None:
        """Feeds the engine's events in until it is gone; returns its death, None after a deactivation."""
        retractions = brought = computed = 0
        long = LongCounts(0, 0)
        async for event in handle.events():
            match event:
                case engine_events.Accepted():
                    pass  # told by its first token
                case engine_events.AttemptFirstToken(rid=rid):
                    self.desk.first_token(rid)
                    self._holding.changed()
                case engine_events.AttemptFinished():
                    self.desk.finished(event)
                    self._holding.changed()
                case engine_events.Lost(rid=rid, attempt=attempt):
                    self.desk.lost(rid, attempt)
                case engine_events.TokensMade(after_first=after_first):
                    self._holding.told(key, after_first)
                case engine_events.EngineCounters():
                    slots = event.free_kv_tokens, event.cached_kv_tokens, event.long_window_tokens
                    ahead = event.remote.ahead if event.remote else 1
                    self.feed(EngineLoad(key, event.running, event.queued, *slots, ahead))
                    self._services.measures.retracted(key.model, self.device, event.retractions - retractions)
                    self._services.measures.kv_brought(key.model, self.device, event.kv_brought_tokens - brought)
                    self._services.measures.computed(key.model, self.device, event.computed_tokens - computed)
                    retractions, brought = event.retractions, event.kv_brought_tokens
                    computed = event.computed_tokens
                    before, long = long, LongCounts(event.long_prompts, event.long_brought_bytes)
                    self._services.measures.long_prompts(key.model, self.device, before, long)
                    self._report_memory()
                case engine_events.Died():
                    self.desk.note_death(key, event)
                    return event
        return None

    # --- for reports ---

    def running(self, key: InstanceKey) -> int:
        """Requests that the instance runs."""
        return self.desk.requests.running(key)

    def counts(self, key: InstanceKey) -> InstanceCounts:
        """Requests of the instance, as the scheduler has them."""
        return self.scheduler.counts(key)

    def times(self, key: InstanceKey) -> InstanceTimes:
        """How the instance's requests fare now."""
        return self.scheduler.times(key, self._services.now_s())

    def idle_s(self, model: ModelName) -> float:
        """How long the model has had no request here that its engines still have to do something for."""
        return self.desk.requests.idle_s(model, self._services.clock_s())

    def take_shortage_s(self) -> float:
        """For a report that is sent now: seconds that requests have been waiting for memory, when it is more than they
        can bear."""
        now_s = self._services.now_s()
        self.scheduler.note_report(now_s)
        return self.scheduler.shortage.age_s(now_s)

    # --- time ---

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._services.now_s()
            self.desk.fronts.tick(now_s)
            self._report_memory()
            if min(self.scheduler.shortage.report_due_s(), self.scheduler.backlog_due_s()) <= now_s:
                self.scheduler.note_report(now_s)  # once: without a controller nobody would take the report
                self._services.hasten_report()
            wake_s = self.scheduler.wake_s
            if wake_s is not None and wake_s <= now_s:
                self.feed(Tick())

    def _report_memory(self) -> None:
        memory = self._memory()
        if not memory.wanted_bytes:  # what neighbours' KV would not be enough for is no wish in the account
            memory = replace(memory, wanted_bytes=max(map(_lacks_bytes, self.desk.handles.values()), default=0))
        if memory != self._last_memory:
            self._last_memory = memory
            self.feed(memory)


def _lacks_bytes(handle: Handle) -> int:
    return 0 if handle.load is None else handle.load.lacks_bytes
