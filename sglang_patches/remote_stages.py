"""Parts of a prefill go through the stops of a route one behind the other, each at another one at the same time. Knows
neither tensors nor links.

::

    peer    | part 0 | part 1 | part 2 | part 3 |
    leader           | part 0 | part 1 | part 2 | part 3 | head

At every stop parts are computed in order, since a part reads the KV of those before it. Questions to one peer are
answered in the order in which they were asked, so that a part may be sent as soon as the one before it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Stop = TypeVar("Stop")
Part = TypeVar("Part")
State = TypeVar("State")
"""What comes out of a stop and goes into the next."""
Question = TypeVar("Question")


@dataclass(frozen=True, slots=True)
class Stages(Generic[Stop, Part, State, Question]):
    """What a leader can do with a part at a stop."""

    is_here: Callable[[Stop], bool]
    run_here: Callable[[Stop, Part, State | None], State]
    send: Callable[[Stop, Part, State | None], Question]
    received: Callable[[Stop, Part, Question], State | None]
    """The answer, if it is there."""
    nap: Callable[[bool, float], None]
    """Take what arrived, after waiting for it if nothing else can be done (True), as it has been since a time."""
    run_ahead: Callable[[Stop, Part, State | None, Question], bool] | None = None
    """Run some of what a peer was asked here, while it waits there; False: nothing was."""


class Passing(Generic[Stop, Part, State, Question]):
    """Parts on their way through ``stops``, in the order in which they were added; more may be added at any time."""

    def __init__(self, stops: Sequence[Stop], stages: Stages[Stop, Part, State, Question]) -> None:
        self._stops, self._stages = stops, stages
        self._parts: list[Part] = []
        self._states: list[State | None] = []
        self._at: list[int] = []
        """By part, the stop that it is at."""
        self._asked: list[Question | None] = []

    def add(self, parts: Sequence[Part]) -> None:
        self._parts += parts
        self._states += [None] * len(parts)
        self._at += [0] * len(parts)
        self._asked += [None] * len(parts)

    @property
    def open(self) -> list[Question]:
        """What was asked and not answered."""
        return [question for question in self._asked if question is not None]

    def passed(self, count: int) -> bool:
        """Whether the first ``count`` (>= 1) parts are behind the last stop."""
        return self._at[count - 1] == len(self._stops)

    def take(self, count: int) -> list[State]:
        """The states of the first ``count`` parts, which have passed, behind the last stop; they are forgotten."""
        states = [state for state in self._states[:count] if state is not None]
        for of_parts in (self._parts, self._states, self._at, self._asked):
            del of_parts[:count]
        return states

    def advance(self) -> bool:
        """Take the answers that are there, ask for what may be asked, and run one part here, if there is one that may
        be: the one at the earliest stop, as what comes out of it is work for others. False: nothing moved. Raises what
        the stages raise."""
        moved = self.pass_on()
        ready = [i for i in range(len(self._parts)) if self._at[i] < len(self._stops) and self._runs_next(i)]
        if ready:
            i = min(ready, key=lambda i: (self._at[i], i))
            self._states[i] = self._stages.run_here(self._stops[self._at[i]], self._parts[i], self._states[i])
            self._at[i] += 1
        return moved or bool(ready)

    def run_ahead(self) -> bool:
        """Do some of what waits for a peer, of the oldest part of which anything can be done here; False: of none."""
        ahead = self._stages.run_ahead
        return ahead is not None and any(
            question is not None and ahead(self._stops[self._at[i]], self._parts[i], self._states[i], question)
            for i, question in enumerate(self._asked)
        )

    def pass_on(self) -> bool:
        """Take the answers that are there, and ask for what may be asked next; False: there were none. May be called
        while a part runs here."""
        moved = False
        for i in range(len(self._parts)):
            while self._at[i] < len(self._stops) and not self._here(i) and self._ask(i):
                moved = True
        return moved

    def _ask(self, i: int) -> bool:
        """Whether part ``i`` has its answer from the peer that it is at."""
        stop, stages = self._stops[self._at[i]], self._stages
        if self._asked[i] is None and self._goes_next(i):
            self._asked[i] = stages.send(stop, self._parts[i], self._states[i])
        question = self._asked[i]
        if question is None or (state := stages.received(stop, self._parts[i], question)) is None:
            return False
        self._states[i], self._asked[i] = state, None
        self._at[i] += 1
        return True

    def _here(self, i: int) -> bool:
        return self._stages.is_here(self._stops[self._at[i]])

    def _goes_next(self, i: int) -> bool:
        """The part before has passed the stop, or waits at a peer that answers in order."""
        before = i - 1
        return i == 0 or self._at[before] > self._at[i] or (self._at[before] == self._at[i] and self._waits(before))

    def _waits(self, i: int) -> bool:
        return self._asked[i] is not None

    def _runs_next(self, i: int) -> bool:
        return self._here(i) and self._goes_next(i)


def run_stages(
    parts: Sequence[Part], stops: Sequence[Stop], stages: Stages[Stop, Part, State, Question]
) -> list[State]:
    """The state of each part behind the last stop. Raises what ``stages`` raise."""
    passing = Passing(stops, stages)
    passing.add(parts)
    moved_s = time.monotonic()
    while not passing.passed(len(parts)):
        moved = passing.advance()
        if moved:
            moved_s = time.monotonic()
        stages.nap(not moved, moved_s)
    return passing.take(len(parts))
