"""The life of an instance where it stands. The node agent and the simulator drive the same machine.

What may happen, and what its owner does::

    state        what happens                                            next         to do
    LOADING      it is loaded                                            READY        SERVE
    LOADING      it is told to leave                                     LOADING      (it leaves once it is loaded, or
                                                                                      has an engine that waits only)
    READY        it is told to leave                                     DRAINING     STOP_ADMITTING
    DRAINING     nothing runs any more, or it is told to carry over,     GONE         END
                 or it has drained for DRAIN_S
    any          its activation failed, or its engine died               GONE

Requests that still run at ``END`` go on elsewhere, with the tokens they have. An activation in progress is never broken
off: an engine that reads weights is only stopped by killing it, and then there is one engine less.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from prism.core.views import InstanceState

DRAIN_S: Final = 30.0
"""How long running requests may take to finish on an instance that leaves; then they are carried over."""


class InstanceStep(Enum):
    """What the owner of an instance does next."""

    SERVE = auto()
    """The device's scheduler hears ``EngineUp``, the controller ``ActivationFinished``."""
    STOP_ADMITTING = auto()
    """The scheduler hears ``EngineDraining``."""
    END = auto()
    """The engine stops, the scheduler hears ``EngineDown``; when the memory is free the controller hears
    ``DeactivationFinished``."""


Steps = tuple[InstanceStep, ...]
"""To be done in order."""


class InstanceLife:
    """Of one instance, from an accepted ``Activate`` on. Times are ``now_s`` of one clock that never goes back."""

    __slots__ = ("_carries", "_leaves", "drained_by_s", "gone", "state")

    def __init__(self) -> None:
        self.state = InstanceState.LOADING
        self.gone = False
        self.drained_by_s = float("inf")
        """Call :meth:`pass_time` then."""
        self._leaves = self._carries = False

    @property
    def leaves(self) -> bool:
        """It was told to."""
        return self._leaves

    @property
    def serves(self) -> bool:
        """It has an engine: it serves or drains."""
        return not self.gone and self.state is not InstanceState.LOADING

    def loaded(self, now_s: float) -> Steps:
        """Weights and engine are there."""
        if self.gone or self.state is not InstanceState.LOADING:
            return ()
        self.state = InstanceState.READY
        return (InstanceStep.SERVE, *(self._drain(0, now_s) if self._leaves else ()))

    def leave(self, carry: bool, running: int, now_s: float) -> Steps:
        """It is told to leave, for the first time or (with ``carry``) not to wait any longer for the ``running``
        requests."""
        self._leaves, self._carries = True, self._carries or carry
        if self.gone or self.state is InstanceState.LOADING:
            return ()
        if self.state is InstanceState.READY:
            return self._drain(running, now_s)
        return self._end() if self._carries else ()

    def emptied(self) -> Steps:
        """The last of its requests is done."""
        return self._end() if self.state is InstanceState.DRAINING else ()

    def pass_time(self, now_s: float) -> Steps:
        """It may have drained for long enough."""
        return self._end() if now_s >= self.drained_by_s else ()

    def lost(self) -> None:
        """Its activation failed, or its engine died."""
        self.gone, self.drained_by_s = True, float("inf")

    def _drain(self, running: int, now_s: float) -> Steps:
        self.state, self.drained_by_s = InstanceState.DRAINING, now_s + DRAIN_S
        return (InstanceStep.STOP_ADMITTING, *(self._end() if self._carries or not running else ()))

    def _end(self) -> Steps:
        if self.gone:
            return ()
        self.lost()
        return (InstanceStep.END,)
