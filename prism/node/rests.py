"""How long models have had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from prism.core.ids import ModelName


class Rests:
    """Of one device. ``clock`` never goes back: ages must not jump when somebody sets the machine's time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._since_s: dict[ModelName, float] = {}

    def begin(self, model: ModelName) -> None:
        """The model came up, or one of its requests is done."""
        self._since_s[model] = self.clock()

    def so_far_s(self, model: ModelName) -> float:
        """Seconds since that; 0 for a model that was never here."""
        now_s = self.clock()
        return now_s - self._since_s.get(model, now_s)
