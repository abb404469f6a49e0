"""Effects on their way out."""

from __future__ import annotations

from prism.core.effects import ClusterEffect


class EffectOutbox:
    """Collects the effects of one event, in the order in which they are to be done."""

    def __init__(self) -> None:
        self._effects: list[ClusterEffect] = []

    def emit(self, effect: ClusterEffect) -> None:
        self._effects.append(effect)

    def take_all(self) -> list[ClusterEffect]:
        """Everything emitted since the last call."""
        effects, self._effects = self._effects, []
        return effects
