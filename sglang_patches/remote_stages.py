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


def run_stages(
    parts: Sequence[Part], stops: Sequence[Stop], stages: Stages[Stop, Part, State, Question]
) -> list[State]:
    """The state of each part behind the last stop. Raises what ``stages`` raise."""
    states: list[State | None] = [None] * len(parts)
    at = [0] * len(parts)
    asked: list[Question | None] = [None] * len(parts)
    moved_s = time.monotonic()

    def here(i: int) -> bool:
        return stages.is_here(stops[at[i]])

    def goes_next(i: int) -> bool:
        """The part before has passed the stop, or waits at a peer that answers in order."""
        return i == 0 or at[i - 1] > at[i] or (at[i - 1] == at[i] and asked[i - 1] is not None)

    while at[-1] < len(stops):
        moved = False
        for i, part in enumerate(parts):
            if at[i] == len(stops) or here(i):
                continue
            if (question := asked[i]) is None and goes_next(i):
                asked[i] = question = stages.send(stops[at[i]], part, states[i])
            if question is not None and (state := stages.received(stops[at[i]], part, question)) is not None:
                states[i], asked[i], moved = state, None, True
                at[i] += 1
        # The earliest stop first: what comes out of it is work for others.
        ready = [i for i in range(len(parts)) if at[i] < len(stops) and here(i) and goes_next(i)]
        if ready:
            i = min(ready, key=lambda i: (at[i], i))
            states[i] = stages.run_here(stops[at[i]], parts[i], states[i])
            at[i] += 1
            moved = True
        if moved:
            moved_s = time.monotonic()
        stages.nap(not moved, moved_s)
    return [state for state in states if state is not None]
