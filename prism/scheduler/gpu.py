"""The scheduler of one device: all models' requests in one queue, handed to engines that can start them at once
(Prism, section 6.3).

::

    event -> GpuScheduler -> WaitingQueue     who waits, in which order
                 |           DeviceEngines    who is in which engine
                 |           MemoryBudget     what memory is left
                 +---------> Dispatcher       from the queue into the engines

A state machine: ``on_event(event, now_s) -> effects``. It owns a request from ``RequestArrived`` until it refuses it,
sends it back, or hears ``Finished``; each request leaves exactly once. With tensor parallelism the scheduler of the
rank-0 device decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prism.core.device_events import (
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
    WaitingShared,
)
from prism.core.effects import Abort, GpuEffect, Refuse, SendBack
from prism.core.events import Tick
from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.request import Request
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceKind
from prism.policy.latency_model import retry_after_s
from prism.scheduler.backlog import Backlog
from prism.scheduler.gpu_dispatch import Dispatcher, too_large
from prism.scheduler.gpu_engines import DeviceEngines
from prism.scheduler.gpu_memory import MemoryBudget
from prism.scheduler.gpu_pauses import Pauses
from prism.scheduler.gpu_queue import WaitingQueue
from prism.scheduler.shortage import Shortage


class InstanceCounts(NamedTuple):
    """Requests of one instance, for device reports."""

    waiting: int = 0
    """In the queue, to be dispatched to it as things stand."""
    running: int = 0
    """Dispatched to it and not finished."""
    served: int = 0
    """So many got a first token from it."""


class InstanceTimes(NamedTuple):
    """How one instance's requests fare, for device reports."""

    waited_s: float = 0.0
    """How long requests have been waiting for it without a break, or what they take to prefill if that is longer."""
    token_s: float = 0.0
    """Mean time of a token of the answers that ended lately; 0: none did."""


class GpuScheduler:
    """See the module. Events about requests or models it does not know are ignored: they crossed on the way."""

    def __init__(self, device: DeviceId, settings: GpuSettings, kind: DeviceKind = DeviceKind.CUDA) -> None:
        self.device = device
        self.settings = settings
        self._queue = WaitingQueue(settings.admission, settings.overdue_share)
        self._engines = DeviceEngines(settings.decode_reserve_tokens, kind, settings.longest_pause_s > 0.0)
        self._memory = MemoryBudget(self._engines)
        self._dispatcher = Dispatcher(settings, self._queue, self._engines, self._memory)
        self._backlog = Backlog()
        self.pauses = Pauses(self._engines, settings.longest_pause_s)
        """Which engines stand still for a moment."""

    # --- questions ---

    @property
    def wake_s(self) -> float | None:
        """Send ``Tick`` at this time at the latest; None: nothing to do before the next event."""
        return self._dispatcher.wake_s

    @property
    def shortage(self) -> Shortage:
        """How long requests have been waiting for memory."""
        return self._memory.shortage

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def rests(self) -> bool:
        """No request waits, for a place or for memory."""
        return not self._queue and not self.shortage.is_short

    def waiting(self) -> dict[ModelName, int]:
        """Models with waiting requests, and how many."""
        return self._queue.counts()

    def counts(self, key: InstanceKey) -> InstanceCounts:
        """Requests of the instance; none when it is not here."""
        engine = self._engines.get(key)
        if engine is None:
            return InstanceCounts()
        serves = self._queue and self._engines.serving(key.model) is engine
        waiting = self._queue.count(key.model) if serves else 0
        return InstanceCounts(waiting, len(engine.in_flight), engine.served)

    def times(self, key: InstanceKey, now_s: float) -> InstanceTimes:
        """How the instance's requests fare now; zeros when it is not here."""
        engine = self._engines.get(key)
        if engine is None:
            return InstanceTimes()
        waits_s = 0.0
        if self._queue and self._engines.serving(key.model) is engine:
            work_s = engine.speed.seconds(self._queue.tokens_of(key.model))
            waits_s = max(work_s, self._queue.waited_s(key.model, now_s))
        return InstanceTimes(waits_s, engine.token_time.mean_s(now_s))

    def backlog_due_s(self) -> float:
        """When the controller is to hear of requests that wait for too long; infinite when of none, or when it
        knows."""
        return self._backlog.report_due_s(self._queue.lines(self._engines.token_s)) if self._queue else float("inf")

    def note_report(self, now_s: float) -> None:
        """A report was made."""
        self.shortage.note_report(now_s)
        self._backlog.note_report(self._queue.lines(self._engines.token_s), now_s)

    def positions(self) -> dict[RequestId, int]:
        """Place of every waiting request in the queue, from 1."""
        return {id: place for place, id in enumerate(self._queue.ranking(), 1)}

    def owns(self, id: RequestId) -> bool:
        return id in self._queue or self._engines.owns(id)

    # --- events ---

    def on_event(self, event: GpuEvent, now_s: float) -> list[GpuEffect]:
        """Take ``event`` in; what is returned is to be done in order. ``now_s`` never decreases."""
        effects: list[GpuEffect] = []
        match event:
            case RequestArrived(request):
                self._arrived(request, now_s, effects)
            case FirstToken(id):
                self._engines.first_token(id, now_s)
            case Finished(id, generated_tokens):
                self._engines.finished(id, generated_tokens, now_s)
            case EngineLoad():
                self._engines.take_load(event)
            case MemoryReport():
                self._memory.take_report(event)
            case RequestCancelled(id):
                self._cancelled(id, now_s, effects)
            case AttemptLost(id, generated_tokens):
                if lost := self._engines.attempt_lost(id, now_s):
                    self._requeue(lost.resumed(generated_tokens), now_s, effects)
            case DispatchRejected(id):
                if rejected := self._engines.left(id, now_s):
                    self._requeue(rejected, now_s, effects)
            case EngineUp():
                self._engines.came_up(event, now_s)
            case EngineDraining(key):
                self._engines.drains(key)
                self._choose_serving(key.model, effects)
            case WaitingShared(key, kept_share):
                self._share_out(key, kept_share, effects)
            case EngineDown(key):
                if self._engines.went_down(key, now_s):
                    self.shortage.memory_came(now_s)
                self._choose_serving(key.model, effects)
            case Tick():
                pass
        self._dispatcher.dispatch(now_s, effects)
        self._memory.note_waiting(now_s)
        return effects

    def take_loads(self, loads: Iterable[EngineLoad], memory: MemoryReport, now_s: float) -> None:
        """:meth:`on_event` of all of these at once, where it :attr:`rests`: no load leads to an effect then."""
        for load in loads:
            self._engines.take_load(load)
        self._memory.take_report(memory)
        self._memory.note_waiting(now_s)

    def _arrived(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        if self.owns(request.id):
            return  # a redelivery of something that is already in hand
        engine = self._engines.serving(request.model)
        if engine is None:
            effects.append(_not_active(request))
        elif 0 < engine.up.max_request_tokens <= request.kv_tokens:
            effects.append(too_large(request, engine.up.max_request_tokens, request.kv_tokens, engine.up.no_long))
        elif len(self._queue) >= self.settings.max_queued and not request.is_resumed:
            work_s = self._engines.work_s(self._queue.tokens())
            reason = because(ReasonCode.QUEUE_FULL, queued=len(self._queue), work_s=work_s)
            effects.append(Refuse(request.id, request.model, reason, retry_after_s(work_s, request.slo_ttft_s)))
        else:
            self._queue.add(request, now_s)

    def _cancelled(self, id: RequestId, now_s: float, effects: list[GpuEffect]) -> None:
        if id in self._queue:
            self._queue.remove(id)
        elif request := self._engines.left(id, now_s):
            effects.append(Abort(id, request.model, because(ReasonCode.CANCELLED)))

    def _requeue(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        if self._engines.serving(request.model) is not None:
            self._queue.add(request, now_s)
        else:
            effects.append(_not_active(request))

    def _choose_serving(self, model: ModelName, effects: list[GpuEffect]) -> None:
        """An instance of the model drains or is gone: another one gets its requests, or they are sent back."""
        if self._engines.choose_serving(model):
            return
        for request in self._queue.of_model(model):
            self._queue.remove(request.id)
            effects.append(_not_active(request))

    def _share_out(self, key: InstanceKey, kept_share: float, effects: list[GpuEffect]) -> None:
        if (engine := self._engines.serving(key.model)) is None or engine.up.key != key:
            return
        for id in self._queue.beyond(key.model, kept_share):
            self._queue.remove(id)
            effects.append(SendBack(id, key.model, because(ReasonCode.SHARED_OUT, kept_share=kept_share)))


def _not_active(request: Request) -> SendBack:
    return SendBack(request.id, request.model, because(ReasonCode.NOT_ACTIVE_HERE))
