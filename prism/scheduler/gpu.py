"""The scheduler of one device: all models' requests in one queue, handed to engines that can start them at once
(Prism, section 6.3).

A state machine: ``on_event(event, now_s) -> effects``. It owns a request from ``RequestArrived`` until it refuses it,
sends it back, or hears ``Finished``; each request leaves exactly once. With tensor parallelism the scheduler of the
rank-0 device decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

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
    WaitingShared,
)
from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.policy.latency_model import PrefillSpeed, SharedClock, retry_after_s
from prism.scheduler.backlog import Backlog
from prism.scheduler.gpu_engine import EngineState, InFlight
from prism.scheduler.gpu_queue import WaitingQueue
from prism.scheduler.shortage import Shortage


@dataclass(frozen=True, slots=True)
class InstanceCounts:
    """Requests of one instance, for device reports."""

    waiting: int = 0
    """In the queue, to be dispatched to it as things stand."""
    running: int = 0
    """Dispatched to it and not finished."""
    served: int = 0
    """So many got a first token from it."""


@dataclass(frozen=True, slots=True)
class InstanceTimes:
    """How one instance's requests fare, for device reports."""

    waited_s: float = 0.0
    """How long requests have been waiting for it without a break, or what they take to prefill if that is longer."""
    token_s: float = 0.0
    """Mean time of a token of the answers that ended lately; 0: none did."""


class GpuScheduler:
    """See the module. Events about requests or models it does not know are ignored: they crossed on the way."""

    def __init__(self, device: DeviceId, settings: GpuSettings) -> None:
        self.device = device
        self.settings = settings
        self._queue = WaitingQueue(settings.admission, settings.overdue_share)
        self._engines: dict[InstanceKey, EngineState] = {}
        self._serving: dict[ModelName, EngineState] = {}
        """Who gets a model's requests: of its instances that do not drain, the one that came up last."""
        self._engine_of: dict[RequestId, EngineState] = {}
        self._orphans: dict[RequestId, Request] = {}
        """Dispatched requests whose engine is gone and whose delivered tokens are not known yet."""
        self._free_bytes: int | None = None
        self._wanted_bytes = 0
        self._blocked_slo_s: float | None = None
        """The tightest objective of the requests that could start at once and lack memory; None: no request does."""
        self.shortage = Shortage()
        self._backlog = Backlog()
        self._clock = SharedClock()
        self._wake_s: float | None = None

    # --- questions ---

    @property
    def wake_s(self) -> float | None:
        """Send ``Tick`` at this time at the latest; None: nothing to do before the next event."""
        return self._wake_s

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def waiting(self) -> dict[ModelName, int]:
        """Models with waiting requests, and how many."""
        return self._queue.counts()

    def counts(self, key: InstanceKey) -> InstanceCounts:
        """Requests of the instance; none when it is not here."""
        engine = self._engines.get(key)
        if engine is None:
            return InstanceCounts()
        waiting = self._queue.count(key.model) if self._serving.get(key.model) is engine else 0
        return InstanceCounts(waiting, len(engine.in_flight), engine.served)

    def times(self, key: InstanceKey, now_s: float) -> InstanceTimes:
        """How the instance's requests fare now; zeros when it is not here."""
        engine = self._engines.get(key)
        if engine is None:
            return InstanceTimes()
        serves = self._serving.get(key.model) is engine
        waits_s = 0.0
        if serves:
            work_s = engine.speed.seconds(self._queue.tokens_of(key.model))
            waits_s = max(work_s, self._queue.waited_s(key.model, now_s))
        return InstanceTimes(waits_s, engine.token_time.mean_s(now_s))

    def backlog_due_s(self) -> float:
        """When the controller is to hear of requests that wait for too long; infinite when of none, or when it
        knows."""
        return self._backlog.report_due_s(self._queue.lines(self._token_s)) if self._queue else float("inf")

    def note_report(self, now_s: float) -> None:
        """A report was made."""
        self.shortage.note_report(now_s)
        self._backlog.note_report(self._queue.lines(self._token_s), now_s)

    def positions(self) -> dict[RequestId, int]:
        """Place of every waiting request in the queue, from 1."""
        return {id: place for place, id in enumerate(self._queue.ranking(), 1)}

    def owns(self, id: RequestId) -> bool:
        return id in self._queue or id in self._engine_of or id in self._orphans

    # --- events ---

    def on_event(self, event: GpuEvent, now_s: float) -> list[GpuEffect]:
        """Take ``event`` in; what is returned is to be done in order. ``now_s`` never decreases."""
        effects: list[GpuEffect] = []
        match event:
            case RequestArrived(request):
                self._arrived(request, now_s, effects)
            case FirstToken(id):
                self._first_token(id, now_s)
            case Finished(id, generated_tokens):
                if engine := self._engine_of.get(id):
                    engine.answered(id, generated_tokens, now_s)
                self._leave_engine(id, now_s)
            case EngineLoad(key):
                if engine := self._engines.get(key):
                    engine.take_load(event)
            case MemoryReport(free_bytes, wanted_bytes):
                self._free_bytes, self._wanted_bytes = free_bytes, wanted_bytes
                for engine in self._engines.values():
                    engine.settle_claims()
            case RequestCancelled(id):
                self._cancelled(id, now_s, effects)
            case AttemptLost(id, generated_tokens):
                self._attempt_lost(id, generated_tokens, now_s, effects)
            case DispatchRejected(id):
                if entry := self._leave_engine(id, now_s):
                    self._requeue(entry.request, now_s, effects)
            case EngineUp():
                self._engine_up(event, now_s)
            case EngineDraining(key):
                if engine := self._engines.get(key):
                    engine.draining = True
                self._choose_serving(key.model, effects)
            case WaitingShared(key, kept_share):
                self._share_out(key, kept_share, effects)
            case EngineDown(key):
                self._engine_down(key, now_s, effects)
            case Tick():
                pass
        self._wake_s = None
        self._dispatch(now_s, effects)
        self.shortage.note_waiting(self._short_slo_s(), now_s)
        return effects

    def _arrived(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        if self.owns(request.id):
            return  # a redelivery of something that is already in hand
        engine = self._serving.get(request.model)
        if engine is None:
            effects.append(SendBack(request.id, request.model, because(ReasonCode.NOT_ACTIVE_HERE)))
        elif 0 < engine.up.max_request_tokens <= request.kv_tokens:
            self._refuse_large(request, engine.up.max_request_tokens, effects)
        elif len(self._queue) >= self.settings.max_queued and not request.is_resumed:
            work_s = self._work_s()
            reason = because(ReasonCode.QUEUE_FULL, queued=len(self._queue), work_s=work_s)
            effects.append(Refuse(request.id, request.model, reason, retry_after_s(work_s, request.slo_ttft_s)))
        else:
            self._queue.add(request, now_s)

    def _first_token(self, id: RequestId, now_s: float) -> None:
        engine = self._engine_of.get(id)
        if engine is not None:
            engine.first_token(id, self._clock.advance(now_s), now_s)
            self._count_sharer(engine, now_s)

    def _leave_engine(self, id: RequestId, now_s: float) -> InFlight | None:
        """The request is in no engine any more. None if it was in none."""
        self._orphans.pop(id, None)
        engine = self._engine_of.pop(id, None)
        if engine is None:
            return None
        entry = engine.gone(id)
        self._count_sharer(engine, now_s)
        return entry

    def _cancelled(self, id: RequestId, now_s: float, effects: list[GpuEffect]) -> None:
        if id in self._queue:
            self._queue.remove(id)
        elif entry := self._leave_engine(id, now_s):
            effects.append(Abort(id, entry.request.model, because(ReasonCode.CANCELLED)))

    def _attempt_lost(self, id: RequestId, generated_tokens: int, now_s: float, effects: list[GpuEffect]) -> None:
        request = self._orphans.pop(id, None)
        if request is None and (entry := self._leave_engine(id, now_s)):
            request = entry.request
        if request is not None:
            self._requeue(request.resumed(generated_tokens), now_s, effects)

    def _requeue(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        if request.model in self._serving:
            self._queue.add(request, now_s)
        else:
            effects.append(SendBack(request.id, request.model, because(ReasonCode.NOT_ACTIVE_HERE)))

    def _engine_up(self, up: EngineUp, now_s: float) -> None:
        previous = self._engines.pop(up.key, None)
        if previous is not None:
            self._orphan(previous, now_s)
        engine = EngineState(up, PrefillSpeed(up.prefill_tokens_per_s), self.settings.decode_reserve_tokens)
        self._engines[up.key] = self._serving[up.key.model] = engine

    def _engine_down(self, key: InstanceKey, now_s: float, effects: list[GpuEffect]) -> None:
        engine = self._engines.pop(key, None)
        if engine is not None:
            self._orphan(engine, now_s)
            self.shortage.memory_came(now_s)
        self._choose_serving(key.model, effects)

    def _choose_serving(self, model: ModelName, effects: list[GpuEffect]) -> None:
        """An instance of the model drains or is gone: another one gets its requests, or they are sent back."""
        left = [e for e in self._engines.values() if e.up.key.model == model and not e.draining]
        if left:
            self._serving[model] = left[-1]
            return
        self._serving.pop(model, None)
        self._send_back_waiting(model, effects)

    def _share_out(self, key: InstanceKey, kept_share: float, effects: list[GpuEffect]) -> None:
        if (engine := self._serving.get(key.model)) is None or engine.up.key != key:
            return
        for id in self._queue.beyond(key.model, kept_share):
            self._queue.remove(id)
            effects.append(SendBack(id, key.model, because(ReasonCode.SHARED_OUT, kept_share=kept_share)))

    def _orphan(self, engine: EngineState, now_s: float) -> None:
        self._count_sharer(engine, now_s, gone=True)
        for id, entry in engine.in_flight.items():
            del self._engine_of[id]
            self._orphans[id] = entry.request

    def _send_back_waiting(self, model: ModelName, effects: list[GpuEffect]) -> None:
        for request in self._queue.of_model(model):
            self._queue.remove(request.id)
            effects.append(SendBack(request.id, model, because(ReasonCode.NOT_ACTIVE_HERE)))

    # --- dispatching ---

    def _dispatch(self, now_s: float, effects: list[GpuEffect]) -> None:
        """Hand out, in rank order, what can start now. A request that lacks memory holds back those behind it, so that
        smaller ones cannot starve it; they may only use what their own engine has free anyway."""
        if not self._queue:
            self._blocked_slo_s = None
            return
        if self.settings.admission is Admission.GREEDY:
            self._dispatch_all(now_s, effects)
            return
        ready = [m for m in self._queue.models() if self._serving[m].can_start()]
        if not ready and not self._queue.wants_plan_for_refusals:
            return
        self._wake_s = self._queue.plan_held_until_s(now_s)
        for request in self._queue.plan(now_s, self._accepted_s(), self._seconds):
            self._refuse_late(request, now_s, effects)
        for request in self._hand_out(ready, now_s, effects):
            if request.must_run_s > now_s:
                self._wake_s = min(self._wake_s or request.must_run_s, request.must_run_s)

    def _hand_out(self, ready: list[ModelName], now_s: float, effects: list[GpuEffect]) -> list[Request]:
        """Dispatch in rank order from the lines of the ``ready`` models; returns the heads that lack memory. For the
        head of the best rank:

        1. Its engine cannot start anything now: its model's line waits.
        2. There is memory for it: it is handed over, and the next of its line is a head.
        3. It would not fit an empty device: refused, and the next of its line is a head.
        4. It lacks memory: its line waits. It is not overtaken: nobody behind it gets memory from now on,
        5. unless it is late already (beyond its bound): then only from twice its bound on, so that it does not make
           others late too.
        """
        heads = [(head[0], model) for model in ready if (head := self._queue.head(model)) is not None]
        heapify(heads)
        free_bytes = self._spendable_bytes()
        if ready:
            self._blocked_slo_s = None
        blocked: list[Request] = []
        while heads:
            model = heappop(heads)[1]
            head, engine = self._queue.head(model), self._serving[model]
            if head is None or not engine.can_start():  # 1
                continue
            _, request, code = head
            cost_bytes = engine.need_bytes(self._claim_tokens(request))
            if cost_bytes is not None and cost_bytes <= free_bytes:  # 2
                free_bytes -= cost_bytes
                self._hand_over(engine, request, code, now_s, effects)
            elif not self._refused_for_size(request, now_s, effects):  # 3, 4
                blocked.append(request)
                if cost_bytes is not None:
                    self._blocked_slo_s = min(request.slo_ttft_s, self._blocked_slo_s or float("inf"))
                patient = code is ReasonCode.OVERDUE and now_s < request.must_run_s + request.max_wait_s
                if cost_bytes is not None and not patient:  # 5
                    free_bytes = 0
                continue
            if (head := self._queue.head(model)) is not None:
                heappush(heads, (head[0], model))
        return blocked

    def _dispatch_all(self, now_s: float, effects: list[GpuEffect]) -> None:
        for model in list(self._queue.models()):
            engine = self._serving[model]
            while (head := self._queue.head(model)) is not None:
                self._hand_over(engine, head[1], ReasonCode.GREEDY, now_s, effects)

    def _hand_over(
        self, engine: EngineState, request: Request, code: ReasonCode, now_s: float, effects: list[GpuEffect]
    ) -> None:
        self._queue.remove(request.id)
        prefill_s = engine.speed.seconds(request.prefill_tokens)
        self._queue.dispatched(code, prefill_s)
        clock_s = self._clock.advance(now_s)
        engine.dispatched(request, self._claim_tokens(request), clock_s)
        self._engine_of[request.id] = engine
        self._count_sharer(engine, now_s)
        reason = because(
            code,
            waited_s=now_s - request.arrival_s,
            slack_s=request.deadline_s - now_s,
            prefill_s=prefill_s,
            queued=len(self._queue),
        )
        effects.append(Dispatch(request.id, engine.up.key, reason))

    def _claim_tokens(self, request: Request) -> int:
        return request.prefill_tokens + min(self.settings.decode_reserve_tokens, request.max_new_tokens or 1 << 30)

    def _spendable_bytes(self) -> float:
        """Free device memory less what dispatched requests will still take and a reserve for running ones to grow."""
        if self._free_bytes is None:
            return float("inf")
        taken = 0
        for engine in self._engines.values():
            if not engine.in_flight:
                continue
            grow_bytes = max(0, engine.growth_tokens - max(0, engine.spare_tokens())) * engine.up.kv_bytes_per_token
            taken += engine.device_claim_bytes() + (grow_bytes if engine.up.elastic else 0)
        return max(0, self._free_bytes - taken)

    def _short_slo_s(self) -> float | None:
        """The tightest objective of requests that wait for memory, here or in their engines; None: no request does."""
        if not self._wanted_bytes:
            return self._blocked_slo_s
        begun = (next(iter(e.in_flight.values())).request.slo_ttft_s for e in self._engines.values() if e.in_flight)
        return min(begun, default=self._blocked_slo_s)

    def _refused_for_size(self, request: Request, now_s: float, effects: list[GpuEffect]) -> bool:
        """Refuse a request that waited for its starvation bound and does not fit although nothing runs here."""
        if self._engine_of or now_s < request.must_run_s:
            return False
        self._queue.remove(request.id)
        engine = self._serving[request.model]
        room = max(0, engine.spare_tokens())
        if engine.up.elastic and self._free_bytes is not None:
            room += self._free_bytes // max(1, engine.up.kv_bytes_per_token)
        self._refuse_large(request, room, effects)
        return True

    def _refuse_large(self, request: Request, room_tokens: int, effects: list[GpuEffect]) -> None:
        reason = because(ReasonCode.PROMPT_TOO_LARGE, tokens=request.kv_tokens, room_tokens=room_tokens)
        effects.append(Refuse(request.id, request.model, reason, None))

    def _refuse_late(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        self._queue.remove(request.id)
        work_s = self._work_s()
        reason = because(
            ReasonCode.LATE_REJECTED,
            slack_s=request.deadline_s - now_s,
            prefill_s=self._seconds(request),
            work_s=work_s,
        )
        effects.append(Refuse(request.id, request.model, reason, retry_after_s(work_s, request.slo_ttft_s)))

    # --- time ---

    def _token_s(self, model: ModelName) -> float:
        """Seconds of device time for one prompt token of the model."""
        return self._serving[model].speed.seconds(1)

    def _seconds(self, request: Request) -> float:
        return self._serving[request.model].speed.seconds(request.prefill_tokens)

    def _accepted_s(self) -> float:
        """Prefill work that the engines have taken and not finished."""
        return sum(e.speed.seconds(e.backlog_tokens) for e in self._engines.values() if e.no_token_yet)

    def _work_s(self) -> float:
        waiting_s = sum(self._serving[m].speed.seconds(tokens) for m, tokens in self._queue.tokens())
        return self._accepted_s() + waiting_s

    def _count_sharer(self, engine: EngineState, now_s: float, gone: bool = False) -> None:
        """Keep the shared clock's number of engines that prefill."""
        shares = engine.no_token_yet > 0 and not gone
        if shares != engine.shares_device:
            engine.shares_device = shares
            self._clock.advance(now_s)
            self._clock.sharers += 1 if shares else -1
