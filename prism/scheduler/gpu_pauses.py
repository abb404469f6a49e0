"""Engines of a device that stand still for a moment (:mod:`prism.policy.pauses`): who does until when, by what is known
of running answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from prism.core.effects import Hold
from prism.core.ids import RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.specs import Prefer
from prism.policy.pauses import Stepping, Turn, due_in_s, turns
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_engines import DeviceEngines

LOOK_EVERY_S: Final = 0.05
"""So long a decision holds: two to five steps."""

_CODES: Final = {Turn.BEARS_IT: ReasonCode.BEARS_A_PAUSE, Turn.GIVEN_UP: ReasonCode.GIVES_WAY}


class Pauses:
    """Of one device. ``longest_s``: no engine stands still for longer without a break of :data:`LOOK_EVERY_S`; 0: none
    ever does."""

    def __init__(self, engines: DeviceEngines, longest_s: float) -> None:
        self._engines, self._longest_s = engines, longest_s
        self._since_s: dict[InstanceKey, float] = {}
        """Who stands still, and since when."""

    @property
    def wanted(self) -> bool:
        """Whether anybody might have to stand still now: two engines or more have answers that have begun."""
        return self._longest_s > 0.0 and sum(1 for e in self._engines if e.answering) > 1

    def look(self, tokens: Mapping[RequestId, int], now_s: float) -> list[Hold]:
        """Who stands still until the next look, or for :data:`LOOK_EVERY_S` if none comes; all others run. ``tokens``:
        what running answers have after their first token, those that may be stopped; an engine with another one
        runs."""
        answering = [engine for engine in self._engines if engine.answering]
        if not self.wanted:
            self._since_s.clear()
            return []
        steppings = [self._stepping(engine, tokens, now_s) for engine in answering]
        holds = []
        for engine, turn in zip(answering, turns(steppings), strict=True):
            key = engine.up.key
            if turn is Turn.RUNS:
                self._since_s.pop(key, None)
                continue
            stood_s = now_s - self._since_s.setdefault(key, now_s)
            reason = because(_CODES[turn], engines=len(answering), answers=engine.answering, stood_s=stood_s)
            holds.append(Hold(key, min(LOOK_EVERY_S, self._longest_s), reason))
        return holds

    def _stepping(self, engine: EngineState, tokens: Mapping[RequestId, int], now_s: float) -> Stepping:
        objective_s = math.inf if engine.up.prefer is Prefer.TTFT else engine.up.slo_tpot_s
        due_s, stoppable = [], True
        for id, entry in engine.in_flight.items():
            if not entry.has_token:
                continue
            made = tokens.get(id)
            stoppable &= made is not None
            due_s.append(due_in_s(made or 0, now_s - entry.first_token_s, objective_s))
        stood_s = now_s - self._since_s.get(engine.up.key, now_s)
        must_run = not stoppable or stood_s + LOOK_EVERY_S > self._longest_s
        step_s, share = self._engines.promises.alone_step(engine)
        return Stepping(step_s, share, tuple(due_s), must_run)
