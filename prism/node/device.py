"""The shell around one device's scheduler: reads its queue, feeds events in, carries effects out.

All methods run on the agent's loop; nothing here blocks. Requests never vanish: each ends in exactly one of
*acknowledged* (its client has everything, or is gone), *refused* (its client got an error) or *moved* to another queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from prism.core.effects import Abort, Dispatch, GpuEffect, Refuse, SendBack
from prism.core.events import (
    AttemptLost,
    DispatchRejected,
    EngineDown,
    EngineDraining,
    EngineLoad,
    EngineUp,
    Finished,
    FirstToken,
    GpuEvent,
    MemoryReport,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.settings import GpuSettings
from prism.engine import events as engine_events
from prism.engine.api import Handle
from prism.engine.errors import EngineGone
from prism.node.fronts import Fronts
from prism.node.intake import Intake
from prism.node.live import Live, Stage
from prism.node.measures import NodeMeasures
from prism.node.rests import Rests
from prism.node.suspects import POISON, Suspects
from prism.scheduler.gpu import GpuScheduler
from prism.store.interface import Queues
from prism.store.ledger import Ledger
from prism.store.values import Entry
from prism.wire import keys
from prism.wire.mailbox import Outbox
from prism.wire.messages import Failed, Finish, ResumeQuery, ResumeReply, Submission, encode
from prism.wire.refusals import error_type, refusal_of

log = logging.getLogger(__name__)

TICK_S: Final = 0.05
MAX_HOPS: Final = 50
"""A request that was moved this often is refused: something places its model and loses it again and again."""
SUPERSEDED_S: Final = 5.0
"""Within this time whoever runs a request instead has asked its front door."""
REMEMBERED_CANCELS: Final = 10_000


class DeviceShell:
    """One device's queue, scheduler and requests. :meth:`run` serves until cancelled."""

    def __init__(
        self,
        device: DeviceId,
        settings: GpuSettings,
        store: Queues,
        outbox: Outbox,
        mailbox: str,
        consumer: str,
        memory: Callable[[], MemoryReport],
        now: Callable[[], float],
        measures: NodeMeasures,
        page_bytes: int = 1,
    ) -> None:
        self.device, self.page_bytes = device, page_bytes
        self.scheduler = GpuScheduler(device, settings)
        self.fronts = Fronts(outbox, self._replied)
        self.ledger = Ledger(store, consumer)
        self.arrivals: Counter[ModelName] = Counter()
        """Requests per model that came straight from a front door; the agent takes and clears it."""
        self.live: dict[RequestId, Live] = {}
        self.served: dict[ModelName, int] = {}
        """Requests that got a first token from the current engine of each model."""
        self.rests = Rests()
        self._suspects = Suspects()
        self.memory_is_short: Callable[[], None] = lambda: None
        """Called when the controller has to hear of it (:mod:`prism.scheduler.shortage`); set by the agent."""
        self._engines: dict[ModelName, tuple[InstanceKey, Handle]] = {}
        self._intake = Intake(store, keys.device_queue(device), consumer, self.ledger, self._admit)
        self._outbox, self._mailbox = outbox, mailbox
        self._memory, self._now, self._measures = memory, now, measures
        self._last_memory: MemoryReport | None = None
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._drained: dict[ModelName, asyncio.Event] = {}

    # --- what the agent calls ---

    async def run(self) -> None:
        """Takes over what an earlier agent of this device left, then serves."""
        await self._intake.take_over()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._intake.run())
            group.create_task(self._clock())

    def engine_up(self, handle: Handle, up: EngineUp) -> None:
        """``handle`` serves; its events are consumed by :meth:`consume`."""
        model = up.key.model
        self._engines[model] = (up.key, handle)
        self.served[model] = 0
        self.rests.begin(model)
        self.feed(up)

    def stop_admitting(self, model: ModelName) -> None:
        """The model leaves: what waits goes back to the inactive queue, what runs may finish."""
        if (engine := self._engines.get(model)) is not None:
            self.feed(EngineDraining(engine[0]))

    async def drained(self, model: ModelName, hurry: asyncio.Event, timeout_s: float) -> None:
        """Returns when no request of ``model`` runs here any more, when ``hurry`` is set, or after ``timeout_s``."""
        if not self._running(model) or hurry.is_set():
            return
        empty = self._drained.setdefault(model, asyncio.Event())
        waits = [asyncio.create_task(event.wait()) for event in (empty, hurry)]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                log.info("%s: %s still runs requests after %.0f s, carrying them over", self.device, model, timeout_s)
        finally:
            for wait in waits:
                wait.cancel()
            self._drained.pop(model, None)

    def engine_down(self, model: ModelName) -> None:
        """The engine is gone. Its requests' front doors are asked what they have; the answers decide what follows."""
        if (engine := self._engines.pop(model, None)) is not None:
            self.feed(EngineDown(engine[0]))
        for live in [x for x in self.live.values() if x.model == model and x.stage is Stage.RUNNING]:
            self._ask(live)

    def cancel(self, request_id: str) -> bool:
        """The client is gone. False when this device does not have the request (it may be on its way: remembered)."""
        live = self.live.get(RequestId(request_id))
        if live is None:
            self._cancelled[request_id] = None
            if len(self._cancelled) > REMEMBERED_CANCELS:
                self._cancelled.popitem(last=False)
            return False
        self._drop(live)
        return True

    def disown(self, request_id: RequestId) -> None:
        """Another consumer owns the request: say nothing more about it. Its engine is stopped a little later, when the
        front door takes the end of this attempt for what it is: one that was superseded."""
        live = self.live.get(request_id)
        if live is None:
            return
        log.warning("%s: %s belongs to somebody else by now", self.device, request_id)
        if live.handle is not None:
            asyncio.get_running_loop().call_later(SUPERSEDED_S, self._stop_disowned, request_id, live.handle)
        self._forget(live, acknowledge=False)

    def _stop_disowned(self, request_id: RequestId, handle: Handle) -> None:
        if request_id not in self.live:  # else it came back, and the engine may have its next attempt
            handle.abort(request_id)

    def feed(self, event: GpuEvent) -> None:
        """One event into the scheduler, its effects out."""
        began_s = time.perf_counter()
        effects = self.scheduler.on_event(event, self._now())
        self._measures.decided(time.perf_counter() - began_s)
        for effect in effects:
            self._carry_out(effect)
            self._measures.decision(effect)

    async def consume(self, model: ModelName, handle: Handle) -> engine_events.Died | None:
        """Feeds the engine's events in until it is gone; returns its death, None after a deactivation."""
        retractions = 0
        async for event in handle.events():
            match event:
                case engine_events.Accepted():
                    pass  # told by its first token
                case engine_events.FirstToken(rid=rid):
                    self.served[model] += 1
                    self.feed(FirstToken(RequestId(rid)))
                case engine_events.Finished():
                    self._finished(event)
                case engine_events.Lost(rid=rid):
                    if live := self._running_as(rid, event.attempt):
                        self._ask(live)
                case engine_events.Load():
                    free, cached = event.free_kv_tokens, event.cached_kv_tokens
                    key = self._engines[model][0]
                    self.feed(EngineLoad(key, event.running, event.queued, free, cached_kv_tokens=cached))
                    self._measures.retracted(model, self.device, event.retractions - retractions)
                    retractions = event.retractions
                    self._report_memory()
                case engine_events.Died():
                    for rid in event.suspects:
                        if live := self.live.get(RequestId(rid)):
                            live.suspicions, live.died_of = live.suspicions + 1, event.reason
                    return event
        return None

    # --- intake ---

    def _admit(self, entry: Entry, submission: Submission) -> None:
        live = Live(entry, submission, suspicions=submission.suspicions)
        if live.id in self.live:
            return  # redelivered while in hand
        self.live[live.id] = live
        if submission.id in self._cancelled:
            self._drop(live)
        elif submission.hops > MAX_HOPS:
            why = (
                f"{str(live.model)!r} was loaded and lost again {submission.hops // 2} times while this request waited."
            )
            self._refuse(live, 503, "model_unstable", why, 5.0)
        elif entry.deliveries > 1 or submission.hops > 0:
            self._ask(live)
        else:
            self.arrivals[live.model] += 1
            self._enter(live)

    def _enter(self, live: Live) -> None:
        live.stage = Stage.WAITING
        self.feed(RequestArrived(live.request()))

    # --- answers of front doors ---

    def _ask(self, live: Live) -> None:
        live.stage, live.handle = Stage.ASKING, None
        query = ResumeQuery(id=live.id, reply_to=self._mailbox)
        self.fronts.ask(live.submission.front, query, self._now())

    def _replied(self, reply: ResumeReply) -> None:
        live = self.live.get(RequestId(reply.id))
        if live is None:
            return
        if not reply.known or reply.complete:
            self._forget(live, acknowledge=True)
            return
        if live.suspicions >= POISON:
            log.error("%s is refused as poison: %s", live.id, live.died_of, extra={"model": live.model})
            words = f" ({live.died_of})" if live.died_of else ""
            name = repr(str(live.model))
            why = f"{live.suspicions} engines of {name} died of this request{words}. It is not tried again."
            self._refuse(live, 500, "poison_request", why, None)
            return
        live.attempt, live.tokens = reply.attempt, tuple(reply.token_ids)
        if not self._suspects.may_run(live):
            self.feed(Finished(live.id))  # its turn comes when the one before it has left; the scheduler knows of none
        elif self.scheduler.owns(live.id):
            live.stage = Stage.WAITING
            self.feed(AttemptLost(live.id, len(live.tokens)))
        else:
            self._enter(live)

    def _finished(self, event: engine_events.Finished) -> None:
        live = self._running_as(event.rid, event.attempt)
        if live is None:
            return
        live.stage = Stage.CLOSING
        self.rests.begin(live.model)
        self.feed(Finished(live.id))
        closing = Finish(
            id=live.id,
            reply_to=self._mailbox,
            attempt=event.attempt,
            total_tokens=event.total_tokens,
            final=event.final,
        )
        self.fronts.ask(live.submission.front, closing, self._now())
        self._note_drained(live.model)

    # --- effects ---

    def _carry_out(self, effect: GpuEffect) -> None:
        live = self.live.get(effect.id)
        if live is None:
            return
        match effect:
            case Dispatch(key=key):
                self._dispatch(live, key)
            case SendBack():
                self._send_back(live)
            case Refuse(reason=reason, retry_after_s=retry_after_s):
                told = refusal_of(live.model, reason)
                self._refuse(live, told.status, told.code, told.message, retry_after_s)
            case Abort():
                if live.handle is not None:
                    live.handle.abort(live.id)

    def _dispatch(self, live: Live, key: InstanceKey) -> None:
        current = self._engines.get(live.model)
        if current is None or current[0] != key:
            asyncio.get_running_loop().call_soon(self.feed, DispatchRejected(live.id))
            return
        live.stage, live.handle = Stage.RUNNING, current[1]
        try:
            current[1].submit(live.work())
        except EngineGone:
            # Its Died event is on the way and engine_down() then asks for this request like for all others.
            log.info("%s: %s went to an engine that just died", self.device, live.id)

    def _send_back(self, live: Live) -> None:
        hops = live.submission.hops + 1
        moved = msgspec.structs.replace(live.submission, hops=hops, suspicions=live.suspicions)
        self.ledger.move(live.entry, keys.INACTIVE_QUEUE, encode(moved))
        self._forget(live, acknowledge=False)

    def _refuse(self, live: Live, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        failed = Failed(
            id=live.id,
            status=status,
            type=error_type(status),
            code=code,
            message=message,
            retry_after_s=retry_after_s,
        )
        self._outbox.send(live.submission.front, failed)
        self._forget(live, acknowledge=True)

    def _drop(self, live: Live) -> None:
        """The client is gone: stop the request wherever it stands."""
        self.feed(RequestCancelled(live.id))
        self._forget(live, acknowledge=True)

    def _forget(self, live: Live, *, acknowledge: bool) -> None:
        self.fronts.forget(live.id)
        self.live.pop(live.id, None)
        if live.stage is not Stage.CLOSING:
            self.rests.begin(live.model)
        if acknowledge:
            self.ledger.done(live.entry)
        if self.scheduler.owns(live.id):
            self.feed(Finished(live.id))
        self._note_drained(live.model)
        if (following := self._suspects.left(live)) is not None:
            asyncio.get_running_loop().call_soon(self._take_turn, following)

    def _take_turn(self, live: Live) -> None:
        """A suspect may go to the scheduler, if nothing else came of it meanwhile."""
        if self.live.get(live.id) is live:
            self._enter(live)

    # --- time ---

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._now()
            self.fronts.tick(now_s)
            self._report_memory()
            if self.scheduler.shortage.report_due_s() <= now_s:
                self.scheduler.shortage.told(now_s)  # once: without a controller nobody would take the report
                self.memory_is_short()
            wake_s = self.scheduler.wake_s
            if wake_s is not None and wake_s <= now_s:
                self.feed(Tick())

    def _report_memory(self) -> None:
        memory = self._memory()
        if memory != self._last_memory:
            self._last_memory = memory
            self.feed(memory)

    def drop_dead_fronts(self, now_s: float) -> None:
        """Ends the requests whose front door is dead: nobody is left to read their tokens. Should it live after all,
        its clients get an error instead of silence."""
        for live in list(self.live.values()):
            if self.fronts.is_dead(live.submission.front, now_s, live.submission.arrival_s):
                log.info("%s: dropping %s, its front door is gone", self.device, live.id)
                why = "The server lost the connection to the process that serves this client."
                failed = Failed(id=live.id, status=503, type="server_error", code="front_silent", message=why)
                self._outbox.send(live.submission.front, failed)
                self._drop(live)

    # --- small questions ---

    def tell_shortage(self) -> float:
        """For a report: seconds that requests have been waiting for memory, when it is more than they can bear."""
        now_s, shortage = self._now(), self.scheduler.shortage
        shortage.told(now_s)
        return shortage.age_s(now_s)

    def idle_s(self, model: ModelName) -> float:
        """How long the model has had no request here that its engine still has to do something for."""
        used = any(x.model == model and x.stage is not Stage.CLOSING for x in self.live.values())
        return 0.0 if used else self.rests.so_far_s(model)

    def _running(self, model: ModelName) -> int:
        return sum(1 for x in self.live.values() if x.model == model and x.stage is Stage.RUNNING)

    def _running_as(self, rid: str, attempt: int) -> Live | None:
        """The request if it runs as this attempt; an event of an older one is late news."""
        live = self.live.get(RequestId(rid))
        if live is None or live.stage is not Stage.RUNNING or live.attempt != attempt:
            return None
        return live

    def _note_drained(self, model: ModelName) -> None:
        event = self._drained.get(model)
        if event is not None and not self._running(model):
            event.set()
