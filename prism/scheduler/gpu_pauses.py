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
from prism.policy.pauses import Stepping, Turn, all_run_for_s, due_in_s, may_matter, turns
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_engines import DeviceEngines

LOOK_EVERY_S: Final = 0.05
"""So long a decision holds: two to five steps."""

_NONE: Final[Mapping[RequestId, int]] = {}
_CODES: Final = {Turn.BEARS_IT: ReasonCode.BEARS_A_PAUSE, Turn.GIVEN_UP: ReasonCode.GIVES_WAY}


class Pauses:
    """Of one device. ``longest_s``: no engine stands still for longer without a break of :data:`LOOK_EVERY_S`; 0: none
    ever does."""

    def __init__(self, engines: DeviceEngines, longest_s: float) -> None:
        self._engines, self._longest_s = engines, longest_s
        self._since_s: dict[InstanceKey, float] = {}
        """Who stands still, and since when."""
        self.next_look_s = math.inf
        """When to look again if no answer begins or ends before: nothing changes until then."""

    @property
    def wanted(self) -> bool:
        """Whether anybody might have to stand still, now or later, as long as no answer begins or ends."""
        return self._longest_s > 0.0 and may_matter(self._engines.promises.answering_shares())

    def look(self, made: Mapping[InstanceKey, Mapping[RequestId, int]], now_s: float) -> list[Hold]:
        """Who stands still until the next look, or for :data:`LOOK_EVERY_S` if none comes; all others run. ``made``:
        tokens that running answers have after their first one, by engine, of those that may be stopped; an engine with
        another one runs."""
        steppings, quiet_s = {}, math.inf
        if self.wanted:
            steppings = {e.up.key: self._stepping(e, made, now_s) for e in self._engines if e.answering}
            quiet_s = all_run_for_s(list(steppings.values()))
        if quiet_s > 0.0:
            self._since_s.clear()
            self.next_look_s = now_s + max(LOOK_EVERY_S, quiet_s)
            return []
        self.next_look_s = now_s + LOOK_EVERY_S
        holds = []
        for (key, stepping), turn in zip(steppings.items(), turns(list(steppings.values())), strict=True):
            if turn is Turn.RUNS:
                self._since_s.pop(key, None)
                continue
            stood_s = now_s - self._since_s.setdefault(key, now_s)
            answers = len(stepping.due_s)
            reason = because(_CODES[turn], engines=len(steppings), answers=answers, stood_s=stood_s)
            holds.append(Hold(key, min(LOOK_EVERY_S, self._longest_s), reason))
        return holds

    def _stepping(
        self, engine: EngineState, made: Mapping[InstanceKey, Mapping[RequestId, int]], now_s: float
    ) -> Stepping:
        key, tokens = engine.up.key, made.get(engine.up.key, _NONE)
        objective_s = math.inf if engine.up.prefer is Prefer.TTFT else engine.up.slo_tpot_s
        due_s, stoppable = [], True
        for id, entry in engine.in_flight.items():
            if not entry.has_token:
                continue
            count = tokens.get(id)
            stoppable &= count is not None
            due_s.append(due_in_s(count or 0, now_s - entry.first_token_s, objective_s))
        must_run = not stoppable or now_s - self._since_s.get(key, now_s) + LOOK_EVERY_S > self._longest_s
        step_s, share = self._engines.promises.alone_step(engine)
        return Stepping(step_s, share, tuple(due_s), must_run, objective_s)
