"""The life of a request on one device: from the moment it was read from the device's queue until its entry there is
acknowledged or moved. The node agent and the simulator drive the same machine, so that a device's scheduler hears the
same in both.

What may happen, and what the scheduler is told::

    stage     what happens                                         next      told
    -         read, and it may have run before                     ASKING
    -         read for the first time                              WAITING   RequestArrived
    ASKING    its front door says what the client has              WAITING   RequestArrived
    WAITING   Dispatch                                             RUNNING
    WAITING   Refuse, SendBack                                     ENDED
    RUNNING   the instance is not here (any more)                  WAITING   DispatchRejected
    RUNNING   its attempt is lost: its front door has to be asked  LOST
    LOST      its front door says what the client has              WAITING   AttemptLost
    LOST      the same, and it may not run yet                     ASKING    Finished
    RUNNING   its last token is out                                CLOSING   Finished
    CLOSING   its client lacks tokens                              WAITING   RequestArrived
    any       its client is gone                                   ENDED     RequestCancelled \\  if the scheduler
    any       its entry is acknowledged, moved, or another's       -         Finished         /   still has it

In the simulator front doors answer at once, and ASKING, LOST and CLOSING take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Final, Generic, Protocol, TypeVar

from prism.core.device_events import AttemptLost, DispatchRejected, Finished, RequestArrived, RequestCancelled
from prism.core.ids import ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request


class Stage(Enum):
    """Where a request stands; see the module."""

    NEW = auto()
    """On no device: just read, or let go of."""
    ASKING = auto()
    """Its front door was asked which tokens the client has: it was run before, here or elsewhere. Or it has answered,
    and the request waits for its turn (:mod:`prism.node.suspects`)."""
    WAITING = auto()
    """In the scheduler's queue."""
    RUNNING = auto()
    """An engine has it."""
    LOST = auto()
    """The attempt is over without an end, and its front door was asked which tokens the client has."""
    CLOSING = auto()
    """The engine is done; the front door was asked whether it has every token."""
    ENDED = auto()
    """Nothing is done for it any more; its entry is still to be acknowledged or moved."""


_SCHEDULED: Final = (Stage.WAITING, Stage.RUNNING, Stage.LOST)
"""The scheduler has it."""
_IN_USE: Final = (*_SCHEDULED, Stage.ASKING)
"""Its model still has to do something for it."""
_ANSWERED: Final = (Stage.ASKING, Stage.LOST, Stage.CLOSING)
_ADMISSIBLE: Final = (Stage.NEW, *_ANSWERED)
_OPEN: Final = tuple(stage for stage in Stage if stage is not Stage.ENDED)
# Tuples and not sets: a look into so few is quicker than the hash of an enum's member.


class Held(Protocol):
    """A request as its world keeps it. Only :class:`DeviceRequests` writes ``stage`` and ``instance``; a new one has
    ``Stage.NEW`` and no instance."""

    stage: Stage
    instance: InstanceKey | None
    """The instance that runs it."""

    @property
    def id(self) -> RequestId: ...
    @property
    def model(self) -> ModelName: ...
    @property
    def delivered_tokens(self) -> int:
        """What its client has of all attempts, as far as is known here."""
        ...

    def request(self) -> Request:
        """As the scheduler sees it."""
        ...


R = TypeVar("R", bound=Held)


class ImpossibleTransition(Exception):
    """A world said something of a request that cannot happen to it where it stands: a fault of the program."""


class DeviceRequests(Generic[R]):
    """All requests of one device, by id. Times are ``now_s`` of a clock that never goes back.

    A method that returns an event has changed the request already; the event is to be given to the scheduler next."""

    def __init__(self) -> None:
        self._held: dict[RequestId, R] = {}
        self._in_use: dict[ModelName, int] = {}
        self._running: dict[InstanceKey, int] = {}
        self._rests_since_s: dict[ModelName, float] = {}

    # --- questions ---

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[R]:
        return iter(self._held.values())

    def __contains__(self, id: RequestId) -> bool:
        return id in self._held

    def get(self, id: RequestId) -> R | None:
        return self._held.get(id)

    def running(self, key: InstanceKey) -> int:
        """How many requests the instance runs."""
        return self._running.get(key, 0)

    @property
    def running_total(self) -> int:
        """How many requests engines run."""
        return sum(self._running.values())

    def run_by(self, key: InstanceKey) -> list[R]:
        """The requests that the instance runs."""
        return [r for r in self._held.values() if r.stage is Stage.RUNNING and r.instance == key]

    def idle_s(self, model: ModelName, now_s: float) -> float:
        """How long nothing had to be done for the model here: since it came up, or was done with its last request. 0
        for a model that was never here."""
        if model in self._in_use:
            return 0.0
        return now_s - self._rests_since_s.get(model, now_s)

    # --- what happens ---

    def came_up(self, model: ModelName, now_s: float) -> None:
        """An instance of the model serves from now on."""
        self._rests_since_s[model] = now_s

    def ask(self, r: R) -> None:
        """Taken in, and its front door is asked before it runs."""
        self._move(r, Stage.ASKING, (Stage.NEW,))
        self._hold(r)

    def admit(self, r: R) -> RequestArrived | AttemptLost:
        """It goes to the scheduler: taken in, or its front door has said what the client has."""
        before = r.stage
        self._move(r, Stage.WAITING, _ADMISSIBLE)
        if before is Stage.NEW:
            self._hold(r)
        elif before is Stage.CLOSING:
            self._use(r.model)
        return AttemptLost(r.id, r.delivered_tokens) if before is Stage.LOST else RequestArrived(r.request())

    def hold_back(self, r: R) -> Finished | None:
        """Its front door has said what the client has, and it is not to run yet: :meth:`admit` follows."""
        before = r.stage
        self._move(r, Stage.ASKING, _ANSWERED)
        if before is Stage.CLOSING:
            self._use(r.model)
        return Finished(r.id) if before is Stage.LOST else None

    def dispatch(self, r: R, key: InstanceKey) -> None:
        """The scheduler wants it run by that instance."""
        self._move(r, Stage.RUNNING, (Stage.WAITING,))
        r.instance = key
        self._running[key] = self._running.get(key, 0) + 1

    def reject_dispatch(self, r: R) -> DispatchRejected:
        """The instance is not here."""
        self._move(r, Stage.WAITING, (Stage.RUNNING,))
        return DispatchRejected(r.id)

    def lose(self, r: R) -> None:
        """Its attempt is over without an end."""
        self._move(r, Stage.LOST, (Stage.RUNNING,))

    def close(self, r: R, now_s: float, generated_tokens: int = 0) -> Finished:
        """Its last token is out, ``generated_tokens`` in all (0: not known)."""
        self._move(r, Stage.CLOSING, (Stage.RUNNING,))
        self._rest(r.model, now_s)
        return Finished(r.id, generated_tokens)

    def give_up(self, r: R, now_s: float) -> None:
        """The scheduler refused it or sent it back."""
        self._end(r, now_s)

    def cancel(self, r: R, now_s: float) -> RequestCancelled | None:
        """Its client is gone."""
        scheduled = r.stage in _SCHEDULED
        self._end(r, now_s)
        return RequestCancelled(r.id) if scheduled else None

    def forget(self, r: R, now_s: float) -> Finished | None:
        """Its entry is acknowledged, moved, or another's."""
        scheduled = r.stage in _SCHEDULED
        if r.stage is not Stage.ENDED:
            self._end(r, now_s)
        self._held.pop(r.id, None)
        r.stage = Stage.NEW
        return Finished(r.id) if scheduled else None

    def clear(self) -> list[R]:
        """The device is gone with all that was on it; returns its requests, none of which is held any more."""
        held = list(self._held.values())
        for counts in (self._held, self._in_use, self._running):
            counts.clear()
        for r in held:
            r.stage, r.instance = Stage.NEW, None
        return held

    # --- books ---

    def _hold(self, r: R) -> None:
        self._held[r.id] = r
        self._use(r.model)

    def _end(self, r: R, now_s: float) -> None:
        used = r.stage in _IN_USE
        self._move(r, Stage.ENDED, _OPEN)
        if used:
            self._rest(r.model, now_s)

    def _move(self, r: R, to: Stage, origins: tuple[Stage, ...]) -> None:
        if r.stage not in origins:
            raise ImpossibleTransition(f"request {r.id} of {r.model} is {r.stage.name} and cannot become {to.name}")
        if r.stage is Stage.RUNNING:
            self._leave_instance(r)
        r.stage = to

    def _leave_instance(self, r: R) -> None:
        assert r.instance is not None  # it runs
        left = self._running[r.instance] - 1
        if left:
            self._running[r.instance] = left
        else:
            del self._running[r.instance]
        r.instance = None

    def _use(self, model: ModelName) -> None:
        self._in_use[model] = self._in_use.get(model, 0) + 1

    def _rest(self, model: ModelName, now_s: float) -> None:
        """The model is done with one of its requests."""
        self._rests_since_s[model] = now_s
        left = self._in_use[model] - 1
        if left:
            self._in_use[model] = left
        else:
            del self._in_use[model]
