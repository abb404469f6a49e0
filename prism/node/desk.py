"""The requests of one device and what is done for them: the scheduler's effects, the front doors' answers, their ends.

All methods run on the agent's loop; nothing here blocks. Requests never vanish: each ends in exactly one of
*acknowledged* (its client has everything, or is gone), *refused* (its client got an error) or *moved* to another queue.
Where a request may stand and what its scheduler is told: :mod:`prism.scheduler.request_life`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from typing import Final

import msgspec

from prism.core.device_events import FirstToken, GpuEvent
from prism.core.effects import Abort, Dispatch, GpuEffect, Refuse, SendBack
from prism.core.ids import ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.engine import events as engine_events
from prism.engine.api import Handle
from prism.engine.errors import EngineGone
from prism.node.fronts import Fronts
from prism.node.live import Live
from prism.node.services import NodeServices
from prism.node.suspects import POISON, Suspects
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.request_life import DeviceRequests, Stage
from prism.store.ledger import Ledger
from prism.store.values import Entry
from prism.wire import keys
from prism.wire.messages import Failed, Finish, ResumeQuery, ResumeReply, Submission, encode
from prism.wire.refusals import error_type, refusal_of

log = logging.getLogger(__name__)

MAX_HOPS: Final = 50
"""A request that was moved this often is refused: something places its model and loses it again and again."""
SUPERSEDED_S: Final = 5.0
"""Within this time whoever runs a request instead has asked its front door."""
REMEMBERED_CANCELS: Final = 10_000


class RequestDesk:
    """Of one device."""

    def __init__(self, scheduler: GpuScheduler, services: NodeServices) -> None:
        self.scheduler, self.device = scheduler, scheduler.device
        self.requests: DeviceRequests[Live] = DeviceRequests()
        self.handles: dict[InstanceKey, Handle] = {}
        """Engines that serve here."""
        self.fronts = Fronts(services.outbox, self._on_reply)
        self.ledger = Ledger(services.store, services.consumer)
        self.arrivals: Counter[ModelName] = Counter()
        """Requests per model that came straight from a front door; the agent takes and clears it."""
        self._services = services
        self._suspects = Suspects()
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def feed(self, event: GpuEvent) -> None:
        """One event into the scheduler, its effects out."""
        began_s = time.perf_counter()
        effects = self.scheduler.on_event(event, self._services.now_s())
        self._services.measures.decided(time.perf_counter() - began_s)
        for effect in effects:
            self._carry_out(effect)
            self._services.measures.decision(effect)

    # --- in ---

    def admit(self, entry: Entry, submission: Submission) -> None:
        """A request was read from the device's queue."""
        live = Live(entry, submission, suspicions=submission.suspicions, died_of=submission.died_of)
        if live.id in self.requests:
            return  # redelivered while in hand
        if submission.id in self._cancelled:
            self._forget(live, acknowledge=True)
        elif submission.hops > MAX_HOPS:
            lost = submission.hops // 2
            words = f" Its engine said: {live.died_of}" if live.died_of else ""
            why = f"{str(live.model)!r} was loaded and lost again {lost} times while this request waited.{words}"
            self._refuse(live, 503, "model_unstable", why, 5.0)
        elif entry.deliveries > 1 or submission.hops > 0:
            self.requests.ask(live)
            self._ask_front(live)
        else:
            self.arrivals[live.model] += 1
            self.feed(self.requests.admit(live))

    def _ask_front(self, live: Live) -> None:
        live.handle = None
        query = ResumeQuery(id=live.id, reply_to=self._services.mailbox)
        self.fronts.ask(live.submission.front, query, self._services.now_s())

    def _on_reply(self, reply: ResumeReply) -> None:
        live = self.requests.get(RequestId(reply.id))
        if live is None:
            return
        if not reply.known or reply.complete:
            self._forget(live, acknowledge=True)
        elif live.suspicions >= POISON:
            self._refuse_poison(live)
        else:
            live.attempt, live.tokens = reply.attempt, tuple(reply.token_ids)
            if self._suspects.may_run(live):
                self.feed(self.requests.admit(live))
            elif (untold := self.requests.hold_back(live)) is not None:
                self.feed(untold)

    def _refuse_poison(self, live: Live) -> None:
        log.error("%s is refused as poison: %s", live.id, live.died_of, extra={"model": live.model})
        words = f" ({live.died_of})" if live.died_of else ""
        name = repr(str(live.model))
        why = f"{live.suspicions} engines of {name} died of this request{words}. It is not tried again."
        self._refuse(live, 500, "poison_request", why, None)

    def _take_turn(self, live: Live) -> None:
        """A suspect may go to the scheduler, if nothing else came of it meanwhile."""
        if self.requests.get(live.id) is live:
            self.feed(self.requests.admit(live))

    # --- what engines say ---

    def first_token(self, rid: str) -> None:
        """A request has its first token of this attempt."""
        self.feed(FirstToken(RequestId(rid)))

    def finished(self, event: engine_events.AttemptFinished) -> None:
        """An engine is done with a request."""
        live = self._running_as(event.rid, event.attempt)
        if live is None or live.instance is None:
            return
        key, now_s = live.instance, self._services.now_s()
        self.feed(self.requests.close(live, self._services.clock_s(), event.total_tokens))
        closing = Finish(
            id=live.id,
            reply_to=self._services.mailbox,
            attempt=event.attempt,
            total_tokens=event.total_tokens,
            final=event.final,
        )
        self.fronts.ask(live.submission.front, closing, now_s)
        self._note_emptied(key)

    def lost(self, rid: str, attempt: int) -> None:
        """An engine stopped this attempt without an end."""
        if live := self._running_as(rid, attempt):
            self._lose(live)

    def lose_all(self, key: InstanceKey) -> None:
        """The instance's engine is gone. Its requests' front doors are asked what they have; the answers decide what
        follows."""
        for live in self.requests.run_by(key):
            self._lose(live)

    def note_death(self, key: InstanceKey, died: engine_events.Died) -> None:
        """The instance's engine died; if by itself, maybe of one of the requests in its last step."""
        for live in self.requests.run_by(key):
            live.died_of = died.reason
        for rid in died.suspects:
            if suspect := self.requests.get(RequestId(rid)):
                suspect.suspicions, suspect.died_of = suspect.suspicions + 1, died.reason

    def _lose(self, live: Live) -> None:
        key = live.instance
        self.requests.lose(live)
        self._ask_front(live)
        if key is not None:
            self._note_emptied(key)

    def _running_as(self, rid: str, attempt: int) -> Live | None:
        """The request if it runs as this attempt; an event of an older one is late news."""
        live = self.requests.get(RequestId(rid))
        if live is None or live.stage is not Stage.RUNNING or live.attempt != attempt:
            return None
        return live

    def _note_emptied(self, key: InstanceKey) -> None:
        if not self.requests.running(key):
            self._services.note_emptied(key)

    # --- effects ---

    def _carry_out(self, effect: GpuEffect) -> None:
        live = self.requests.get(effect.id)
        if live is None:
            return
        match effect:
            case Dispatch(key=key):
                self._dispatch(live, key)
            case SendBack():
                self.requests.give_up(live, self._services.clock_s())
                self._send_back(live)
            case Refuse(reason=reason, retry_after_s=retry_after_s, detail=detail):
                self.requests.give_up(live, self._services.clock_s())
                told = refusal_of(live.model, reason, detail)
                self._refuse(live, told.status, told.code, told.message, retry_after_s)
            case Abort():
                if live.handle is not None:
                    live.handle.abort(live.id)

    def _dispatch(self, live: Live, key: InstanceKey) -> None:
        self.requests.dispatch(live, key)
        live.handle = self.handles.get(key)
        if live.handle is None:
            asyncio.get_running_loop().call_soon(self._reject_dispatch, live, key)
            return
        try:
            live.handle.submit(live.work())
        except EngineGone:
            # Its Died event is on the way, and with it this request is lost like all others there.
            log.info("%s: %s went to an engine that just died", self.device, live.id)

    def _reject_dispatch(self, live: Live, key: InstanceKey) -> None:
        if self.requests.get(live.id) is live and live.stage is Stage.RUNNING and live.instance == key:
            self.feed(self.requests.reject_dispatch(live))

    def _send_back(self, live: Live) -> None:
        hops = live.submission.hops + 1
        moved = msgspec.structs.replace(live.submission, hops=hops, suspicions=live.suspicions, died_of=live.died_of)
        self.ledger.move(live.entry, [keys.INACTIVE_QUEUE], encode(moved))
        self._forget(live, acknowledge=False)

    # --- out ---

    def cancel(self, request_id: str) -> bool:
        """The client is gone. False when this device does not have the request (it may be on its way: remembered)."""
        live = self.requests.get(RequestId(request_id))
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
        live = self.requests.get(request_id)
        if live is None:
            return
        log.warning("%s: %s belongs to somebody else by now", self.device, request_id)
        if live.handle is not None:
            asyncio.get_running_loop().call_later(SUPERSEDED_S, self._stop_disowned, request_id, live.handle)
        self._forget(live, acknowledge=False)

    def _stop_disowned(self, request_id: RequestId, handle: Handle) -> None:
        if request_id not in self.requests:  # else it came back, and the engine may have its next attempt
            handle.abort(request_id)

    def drop_dead_fronts(self, now_s: float) -> None:
        """Ends the requests whose front door is dead: nobody is left to read their tokens. Should it live after all,
        its clients get an error instead of silence."""
        for live in list(self.requests):
            if self.fronts.is_dead(live.submission.front, now_s, live.submission.arrival_s):
                log.info("%s: dropping %s, its front door is gone", self.device, live.id)
                why = "The server lost the connection to the process that serves this client."
                failed = Failed(id=live.id, status=503, type="server_error", code="front_silent", message=why)
                self._services.outbox.send(live.submission.front, failed)
                self._drop(live)

    def _refuse(self, live: Live, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        failed = Failed(
            id=live.id,
            status=status,
            type=error_type(status),
            code=code,
            message=message,
            retry_after_s=retry_after_s,
        )
        self._services.outbox.send(live.submission.front, failed)
        self._forget(live, acknowledge=True)

    def _drop(self, live: Live) -> None:
        """The client is gone: stop the request wherever it stands."""
        key = live.instance
        cancelled = self.requests.cancel(live, self._services.clock_s())
        if cancelled is not None:
            self.feed(cancelled)
        self._forget(live, acknowledge=True)
        if key is not None:
            self._note_emptied(key)

    def _forget(self, live: Live, *, acknowledge: bool) -> None:
        key = live.instance
        self.fronts.forget(live.id)
        untold = self.requests.forget(live, self._services.clock_s())
        if acknowledge:
            self.ledger.done(live.entry)
        if untold is not None:
            self.feed(untold)
        if key is not None:
            self._note_emptied(key)
        if (following := self._suspects.left(live)) is not None:
            asyncio.get_running_loop().call_soon(self._take_turn, following)
