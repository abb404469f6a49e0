"""Handing a device's waiting requests to its engines: in rank order, what can start now (Prism, section 6.3)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from prism.core.effects import Dispatch, GpuEffect, Refuse
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode, because
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.policy.latency_model import retry_after_s
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_engines import DeviceEngines
from prism.scheduler.gpu_gate import PromiseGate
from prism.scheduler.gpu_memory import MemoryBudget
from prism.scheduler.gpu_queue import WaitingQueue


class Dispatcher:
    """Owned by one :class:`prism.scheduler.gpu.GpuScheduler`; moves requests from its queue into its engines."""

    def __init__(
        self, settings: GpuSettings, queue: WaitingQueue, engines: DeviceEngines, memory: MemoryBudget
    ) -> None:
        self._settings, self._queue, self._engines, self._memory = settings, queue, engines, memory
        self._gate = PromiseGate(settings, queue, engines)
        self.wake_s: float | None = None
        """Dispatch again at this time at the latest; None: nothing changes before the next event."""

    def dispatch(self, now_s: float, effects: list[GpuEffect]) -> None:
        """Hand out, in rank order, what can start now. A request that lacks memory holds back those behind it, so that
        smaller ones cannot starve it; they may only use what their own engine has free anyway."""
        self.wake_s = None
        if not self._queue:
            self._memory.none_blocked()
            return
        if self._settings.admission is Admission.GREEDY:
            self._dispatch_all(now_s, effects)
            return
        ready = [m for m in self._queue.models() if self._engines.of(m).can_start()]
        if not ready and not self._queue.wants_plan_for_refusals:
            return
        self.wake_s = self._queue.plan_held_until_s(now_s)
        engines = self._engines
        for request in self._queue.plan(now_s, engines.accepted_s(), engines.prefill_s, engines.speeds_version):
            self._refuse_late(request, now_s, effects)
        for request in self._hand_out(ready, now_s, effects):
            self._wake_by(request.must_run_s, now_s)

    def _hand_out(self, ready: list[ModelName], now_s: float, effects: list[GpuEffect]) -> list[Request]:
        """Dispatch in rank order from the lines of the ``ready`` models; returns the heads that lack memory. For the
        head of the best rank:

        1. Its engine cannot start anything now: its model's line waits.
        2. It would break promises (:mod:`.gpu_promises`): it waits, and those of its line that are too late as well.
        3. There is memory for it: it is handed over, and the next of its line is a head.
        4. It would not fit an empty device: refused, and the next of its line is a head.
        5. It lacks memory: its line waits. It is not overtaken: nobody behind it gets memory from now on,
        6. unless it is late already (beyond its bound): then only from twice its bound on, so that it does not make
           others late too.
        """
        heads = self._heads(ready)
        self._gate.begin_round(now_s)
        free_bytes = self._memory.spendable_bytes()
        if ready:
            self._memory.none_blocked()
        blocked: dict[ModelName, Request] = {}
        while heads:
            _, model, too_late = heappop(heads)
            head, engine = self._queue.head_of(model, too_late), self._engines.of(model)
            if head is None or model in blocked or not engine.can_start():  # 1
                continue
            _, request, code = head
            if not self._gate.admits(engine, request, code, now_s):  # 2
                continue
            claim_tokens = self._claim_tokens(engine, request)
            cost_bytes = engine.need_bytes(claim_tokens)
            fits = cost_bytes is not None and cost_bytes <= free_bytes
            if fits or self._fits_alone(engine, claim_tokens):  # 3
                free_bytes -= cost_bytes or 0
                self._hand_over(engine, request, code, now_s, effects)
            elif not self._refused_for_size(request, claim_tokens, now_s, effects):  # 4, 5
                blocked[model] = request
                if cost_bytes is not None:
                    self._memory.note_blocked(request.slo_ttft_s)
                patient = code is ReasonCode.OVERDUE and now_s < request.must_run_s + request.max_wait_s
                if cost_bytes is not None and not patient:  # 6
                    free_bytes = 0.0
                continue
            if (head := self._queue.head_of(model, too_late)) is not None:
                heappush(heads, (head[0], model, too_late))
        self._wake_by(self._gate.wake_s, now_s)
        return list(blocked.values())

    def _heads(self, ready: list[ModelName]) -> list[tuple[int, ModelName, bool]]:
        """Rank, model and whether they are too late of the first requests of the lines, as a heap."""
        heads = [
            (head[0], model, too_late)
            for model in ready
            for too_late in (False, True)
            if (head := self._queue.head_of(model, too_late)) is not None
        ]
        heapify(heads)
        return heads

    def _wake_by(self, at_s: float, now_s: float) -> None:
        if now_s < at_s < float("inf"):
            self.wake_s = at_s if self.wake_s is None else min(self.wake_s, at_s)

    def _dispatch_all(self, now_s: float, effects: list[GpuEffect]) -> None:
        for model in list(self._queue.models()):
            engine = self._engines.of(model)
            while (head := self._queue.head(model)) is not None:
                self._hand_over(engine, head[1], ReasonCode.GREEDY, now_s, effects)

    def _hand_over(
        self, engine: EngineState, request: Request, code: ReasonCode, now_s: float, effects: list[GpuEffect]
    ) -> None:
        self._queue.remove(request.id)
        prefill_s = engine.speed.seconds(request.prefill_tokens)
        self._queue.dispatched(code, prefill_s)
        self._engines.dispatched(engine, request, self._claim_tokens(engine, request), now_s)
        self._gate.begun(request)
        reason = because(
            code,
            waited_s=now_s - request.arrival_s,
            slack_s=request.deadline_s - now_s,
            prefill_s=prefill_s,
            queued=len(self._queue),
        )
        effects.append(Dispatch(request.id, engine.up.key, reason))

    def _claim_tokens(self, engine: EngineState, request: Request) -> int:
        return engine.claim_tokens(request, self._settings.decode_reserve_tokens)

    def _fits_alone(self, engine: EngineState, claim_tokens: int) -> bool:
        """Nothing runs here, and the engine has the slots once it drops what it caches: that is free by the slot and
        not by the page, so that it may be less than the pages that a request costs."""
        return self._engines.run_nothing and claim_tokens <= self._memory.room_tokens(engine)

    def _refused_for_size(self, request: Request, claim_tokens: int, now_s: float, effects: list[GpuEffect]) -> bool:
        """Refuse a request that waited for its starvation bound and does not fit, with what is kept for its answer,
        although nothing runs here."""
        if not self._engines.run_nothing or now_s < request.must_run_s:
            return False
        self._queue.remove(request.id)
        effects.append(too_large(request, self._memory.room_tokens(self._engines.of(request.model)), claim_tokens))
        return True

    def _refuse_late(self, request: Request, now_s: float, effects: list[GpuEffect]) -> None:
        self._queue.remove(request.id)
        work_s = self._engines.work_s(self._queue.tokens())
        reason = because(
            ReasonCode.LATE_REJECTED,
            slack_s=request.deadline_s - now_s,
            prefill_s=self._engines.prefill_s(request),
            work_s=work_s,
        )
        effects.append(Refuse(request.id, request.model, reason, retry_after_s(work_s, request.slo_ttft_s)))


def too_large(request: Request, room_tokens: int, tokens: int, why: str = "") -> Refuse:
    """The refusal of a request of ``tokens`` that never fits: its engine has room for ``room_tokens`` at the most, and
    says ``why`` it does not serve larger ones."""
    reason = because(ReasonCode.PROMPT_TOO_LARGE, tokens=tokens, room_tokens=room_tokens)
    return Refuse(request.id, request.model, reason, None, why)
