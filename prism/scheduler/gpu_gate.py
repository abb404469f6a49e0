"""Which waiting requests may begin as far as promises to those that run go (:mod:`prism.policy.promises`), and whose
turn it is to begin all the same."""

from __future__ import annotations

import math
from typing import Final

from prism.core.ids import ModelName, RequestId
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import Prefer
from prism.policy.prefill_turns import patient_until_s
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_engines import DeviceEngines
from prism.scheduler.gpu_queue import WaitingQueue

_TOO_LATE = (ReasonCode.LATE, ReasonCode.OVERDUE)
_HOLDS_S: Final = 0.05
"""So long an answer holds while nothing begins, ends or answers on the device: what runs has come that much further."""
_PRESSED: Final = 2.0
"""A line is pressed from when on the first one's deadline is nearer than so many times what all its prompts take:
decoding between them takes about as long."""


class PromiseGate:
    """Owned by one :class:`prism.scheduler.gpu_dispatch.Dispatcher`. Asked for heads of lines in rank order."""

    def __init__(self, settings: GpuSettings, queue: WaitingQueue, engines: DeviceEngines) -> None:
        self._on = settings.admission is Admission.MOORE_HODGSON
        self._queue, self._engines = queue, engines
        self._turns = OverdueTurns(settings.overdue_share)
        self._refusals: dict[tuple[RequestId, int, bool, bool], float] = {}
        """What was asked of the promises and denied, and until when that holds if nothing changes."""
        self._refusals_of = -1
        """Version of the promises that they are of."""
        self._holds = self._held = False
        """Some request that could be in time was held in this round; and in the last one."""
        self.wake_s = float("inf")
        """When a request that was held in this round cannot wait any longer."""

    def begin_round(self, now_s: float) -> None:
        """What can begin is about to be looked for."""
        self._turns.look(self._engines, now_s)
        self._held, self._holds, self.wake_s = self._holds, False, float("inf")

    def admits(self, engine: EngineState, request: Request, code: ReasonCode, now_s: float) -> bool:
        """Whether the request, the first of its line, may go to its engine.

        1. Its stream has begun, or its engine's requests take turns: it may.
        2. Answers of its engine have stood still for prompts and are to go on first, or it can wait and they would: it
           waits.
        3. It is too late: while nobody in time is held, where it harms nobody; when it is overdue, in its turn.
        4. Else if it breaks no promise, or when it cannot wait any longer and more requests are in time with it.
        """
        if not self._on or engine.up.fair or code is ReasonCode.RESUMED:  # 1
            return True
        before_s = self._engines.accepted_s() + engine.speed.seconds(request.prefill_tokens)
        if now_s < (due_s := self._turn_s(engine, request, before_s, now_s)):  # 2
            self.wake_s = min(self.wake_s, due_s)
            return False
        promises, model = self._engines.promises, request.model
        followed = len(self._queue.models()) > 1
        if code in _TOO_LATE and engine.up.prefer is not Prefer.TPOT:  # 3
            free = not (self._holds or self._held)
            if free and self._may_begin(engine, request, 0, True, followed, now_s):
                return True
            return code is ReasonCode.OVERDUE and self._turns.takes(request, now_s)
        latest_s = promises.latest_s(request, before_s)
        patient = engine.up.prefer is Prefer.TPOT
        in_time, can_wait = self._queue.in_time(model), patient or now_s < latest_s
        if self._may_begin(engine, request, in_time, can_wait, followed, now_s):  # 4
            return True
        if code is ReasonCode.OVERDUE and self._turns.takes(request, now_s):
            return True
        self._holds = True
        if now_s < latest_s and not patient:
            self.wake_s = min(self.wake_s, latest_s)
        return False

    def _may_begin(
        self, engine: EngineState, request: Request, in_time: int, can_wait: bool, followed: bool, now_s: float
    ) -> bool:
        """As :meth:`Promises.may_begin`, which is asked with every event of an overloaded device: what it denied holds
        for a moment if nothing has changed since but the time."""
        promises = self._engines.promises
        if self._refusals_of != promises.version:
            self._refusals_of = promises.version
            self._refusals.clear()
        question = request.id, in_time, can_wait, followed
        if now_s < self._refusals.get(question, 0.0):
            return False
        may = promises.may_begin(engine, request, in_time, can_wait, followed, now_s)
        if not may:
            self._refusals[question] = now_s + _HOLDS_S
        return may

    def _turn_s(self, engine: EngineState, request: Request, before_s: float, now_s: float) -> float:
        """From when on the engine's answers bear the request's prompt; 0 where there are none. ``before_s``: what is
        prefilled before its first token comes, its own prompt included."""
        if not engine.answering:
            return 0.0
        promises, age_s = self._engines.promises, now_s - engine.first_token_sum_s / engine.answering
        engine.turns.expect(promises.step_s(engine), engine.pace.answer_s, age_s)
        prompts_s = engine.speed.seconds(engine.backlog_tokens + request.prefill_tokens)
        if engine.up.prefer is Prefer.TPOT:  # it waits for answers of its engine that it could stop
            return engine.turns.due_s(prompts_s, math.inf, now_s)
        patient_s = patient_until_s(request.arrival_s, request.slo_ttft_s, before_s)
        pressed = promises.runs_alone(engine) and now_s >= request.deadline_s - _PRESSED * self._line_s(engine)
        return engine.turns.due_s(prompts_s, patient_s, now_s, pressed=pressed)

    def _line_s(self, engine: EngineState) -> float:
        """What all prompts of the engine's model take, those that wait included."""
        return engine.speed.seconds(engine.backlog_tokens + self._queue.tokens_of(engine.up.key.model))

    def begun(self, request: Request) -> None:
        """The request went to its engine."""
        self._turns.begun(request)


class OverdueTurns:
    """Requests beyond their starvation bound that would break promises: one model's at a time begins all the same,
    as long as that takes no more than its share of the time."""

    def __init__(self, share: float) -> None:
        self._pause = 1.0 / share - 1.0
        self._model: ModelName | None = None
        self._since_s = 0.0
        self._next_s = float("-inf")
        self._begun: set[RequestId] = set()

    def look(self, engines: DeviceEngines, now_s: float) -> None:
        """A turn ends when all that began in it are done; the next one begins after its pause."""
        if self._model is None:
            return
        self._begun = {id for id in self._begun if engines.owns(id)}
        if not self._begun:
            self._next_s, self._model = now_s + self._pause * (now_s - self._since_s), None

    def takes(self, request: Request, now_s: float) -> bool:
        """Whether it is the request's turn: those of one model have it that were overdue when it began."""
        if self._model is None and now_s >= self._next_s:
            self._model, self._since_s = request.model, now_s
        return self._model == request.model and request.must_run_s <= self._since_s

    def begun(self, request: Request) -> None:
        """The request went to its engine."""
        if request.model == self._model:
            self._begun.add(request.id)
