"""One instance's orders to several machines, joined: ready when all are ready, gone when all are gone.

What a machine is known to hold of the instance, and what follows::

    holds      what is heard                                         holds next
    LOADING    ready                                                 READY
    LOADING    failed: nothing of it is there                        GONE
    LOADING    it is to leave (another machine failed or was lost,   LEAVING
    READY        or the scheduler deactivates the instance)
    LEAVING    left                                                  GONE
    any        the machine is lost                                   GONE

Commands may be repeated and their answers come in any order: what is heard of a machine that is not in that state is
old news. Nothing here is sent or timed; :mod:`prism.controller.orders` does that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from prism.core.events import ActivationError, ActivationFailed, ActivationFinished, DeactivationFinished
from prism.core.ids import NodeId
from prism.core.instances import InstanceKey


class Holding(Enum):
    """What a machine holds of the instance; see the module."""

    LOADING = auto()
    READY = auto()
    LEAVING = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Leave:
    """To be sent to the machine: let the instance leave (again, when it is hurried by ``carry``)."""

    node: NodeId
    carry: bool


Conclusion = ActivationFinished | ActivationFailed | DeactivationFinished
Step = Leave | Conclusion
"""What follows: commands to machines, and what the scheduler is told."""


class JointOrder:
    """Of one instance. Every method returns what follows, in order; :attr:`over` says when nothing more will.

    Each conclusion comes at most once. After the loss of a machine the scheduler, which heard of the loss itself, is
    told nothing any more."""

    def __init__(self, key: InstanceKey, nodes: Iterable[NodeId], *, serves: bool) -> None:
        """An order to load the instance on ``nodes``, or (``serves``) one that is ready there already."""
        self.key = key
        self._holds = dict.fromkeys(nodes, Holding.READY if serves else Holding.LOADING)
        self._ready = set(self._holds) if serves else set()
        """Machines that have said so, whatever they were told since."""
        self._seconds, self._early = 0.0, False
        self._failure: tuple[ActivationError, str] | None = None
        self._told_ready = serves
        """The scheduler knows that the instance is ready."""
        self._told_end = False
        """It knows that it is gone; it is told nothing any more."""
        self._carries = False

    @property
    def over(self) -> bool:
        """Every machine is ready, or nothing is left anywhere."""
        kinds = set(self._holds.values())
        return kinds in ({Holding.GONE}, {Holding.READY})

    def holds(self, node: NodeId) -> Holding:
        return self._holds.get(node, Holding.GONE)

    # --- what machines say ---

    def ready(self, node: NodeId, seconds: float, early: bool = False, whole_only: str = "") -> list[Step]:
        """Its parts serve, after so many seconds; ``early``: before all their weights are there, ``whole_only``: why no
        instance of the model can."""
        self._ready.add(node)
        self._seconds, self._early = max(self._seconds, seconds), self._early or early
        if self.holds(node) is Holding.LOADING:
            self._holds[node] = Holding.READY
        if self._told_ready or self._told_end or self._failure is not None or self._ready < set(self._holds):
            return []
        self._told_ready = True
        return [ActivationFinished(self.key, self._seconds, self._early, whole_only)]

    def failed(self, node: NodeId, error: ActivationError, detail: str) -> list[Step]:
        """Nothing of it is there; what the others have of it must go, too."""
        if self.holds(node) not in (Holding.LOADING, Holding.LEAVING):
            return []
        self._failure = self._failure or (error, detail)
        self._holds[node] = Holding.GONE
        return [*self._leave(carry=True), *self._conclude()]

    def left(self, node: NodeId) -> list[Step]:
        """It was told to let its parts leave, and they have."""
        if self.holds(node) is not Holding.LEAVING:
            return []
        self._holds[node] = Holding.GONE
        return self._conclude()

    def lost(self, node: NodeId) -> list[Step]:
        """The machine is gone, and the scheduler has been told."""
        if self.holds(node) is Holding.GONE:
            return []
        self._holds[node], self._told_end = Holding.GONE, True
        return self._leave(carry=True)

    # --- what the scheduler says ---

    def deactivate(self, carry: bool) -> list[Step]:
        """The instance is to leave everywhere; a second time with ``carry``: at once."""
        hurried = [n for n, h in self._holds.items() if h is Holding.LEAVING] if carry and not self._carries else []
        return [*(Leave(node, True) for node in hurried), *self._leave(carry)]

    def _leave(self, carry: bool) -> list[Step]:
        self._carries = self._carries or carry
        staying = [n for n, held in self._holds.items() if held in (Holding.LOADING, Holding.READY)]
        for node in staying:
            self._holds[node] = Holding.LEAVING
        return [Leave(node, carry) for node in staying]

    def _conclude(self) -> list[Step]:
        if self._told_end or set(self._holds.values()) != {Holding.GONE}:
            return []
        self._told_end = True
        if self._failure is not None:
            return [ActivationFailed(self.key, *self._failure)]
        return [DeactivationFinished(self.key)]
