"""Requests in whose step an engine died by itself. Of those of one model only one is run at a time, beside requests
that are under no suspicion: an engine that dies again tells the culprit from its neighbours."""

from __future__ import annotations

from collections import deque
from typing import Final

from prism.core.ids import ModelName, RequestId
from prism.node.live import Live

POISON: Final = 2
"""A request in whose steps so many engines died is refused: it would take down the next one too."""


class Suspects:
    """Whose turn it is, per model. One device; changed by its shell only."""

    def __init__(self) -> None:
        self._turn: dict[ModelName, RequestId] = {}
        self._waiting: dict[ModelName, deque[Live]] = {}

    def may_run(self, live: Live) -> bool:
        """Whether ``live`` may go to the scheduler now; if not, it is kept and :meth:`left` hands it out."""
        if not live.suspicions or self._turn.setdefault(live.model, live.id) == live.id:
            return True
        self._waiting.setdefault(live.model, deque()).append(live)
        return False

    def left(self, live: Live) -> Live | None:
        """``live`` is not here any more. Returns the one whose turn it is then, if that changed."""
        waiting = self._waiting.get(live.model)
        if self._turn.get(live.model) != live.id:
            if waiting is not None and live in waiting:
                waiting.remove(live)
            return None
        if not waiting:
            self._waiting.pop(live.model, None)
            del self._turn[live.model]
            return None
        following = waiting.popleft()
        self._turn[live.model] = following.id
        return following
