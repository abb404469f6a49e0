"""How a long request and all others of its engine take turns. Pure.

Steps by time, since one of its steps may take as long as many of theirs (it reads all of its KV over a link):

::

    | others | long step of t |   others, for 3 t   | long step | ...      while others have work
    | long | long | long | ...                                           while they have none

The memory of its window by steps, since others may need that memory to begin at all:

::

    | WINDOW_STEPS long steps, others wait | those others are let in | window back, WINDOW_STEPS | ...

Other models of the device get it sooner, as they get any memory that is not needed to go on::

    | a long step, neighbours wish | away, until they have it | window back ...
                                   | away, as long as WINDOW_STEPS take | window back, WINDOW_STEPS |  they still wish
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

LONG_SHARE: Final = 0.25
"""Of an engine's time that its long request gets while others have work. Their time per token is then 4/3 of what it is
alone, on average, and one of them is held up by one long step at most."""


WINDOW_STEPS: Final = 16
"""Of the long request while others wait for memory; then it gives its window's to them."""


class LongTurns:
    """Of one engine. In every stretch of time in which others have work the long request has LONG_SHARE of it, and one
    step more, at the most."""

    def __init__(self, share: float = LONG_SHARE) -> None:
        self._times = (1.0 - share) / share
        self.owed_s = 0.0
        """That the others get before its next step."""

    def took(self, seconds: float, long: bool) -> None:
        """A step took ``seconds``, one of the long request's or the others'."""
        if long:
            self.owed_s += seconds * self._times
        else:
            self.owed_s = max(0.0, self.owed_s - seconds)

    def rested(self) -> None:
        """The others have nothing to do: nothing is owed to them."""
        self.owed_s = 0.0

    @property
    def may_go(self) -> bool:
        """Whether the next step may be the long request's, with others waiting for theirs."""
        return self.owed_s <= 0.0


class WindowTurns:
    """Of one engine. Who waits for memory is let in before the window is taken again, whoever the long requests are;
    who comes after that waits for WINDOW_STEPS steps with the window there."""

    def __init__(self, steps: int = WINDOW_STEPS) -> None:
        self._most = steps
        self._steps = 0
        """With the window there, and others waiting for memory."""
        self._before: set[str] = set()
        """Who is let in before the window is taken again."""

    def stepped(self, waiting: Collection[str]) -> None:
        """A step of the long request is over; ``waiting``: requests, by id, that wait for memory."""
        self._steps = self._steps + 1 if waiting else 0

    @property
    def gives_way(self) -> bool:
        """Whether the window's memory is for the others now."""
        return self._steps >= self._most

    def gave_way(self, waiting: Collection[str]) -> None:
        """The window's memory is free for ``waiting``: it gave way, or its request is over."""
        self._before = set(waiting)
        self._steps = 0

    def stays(self) -> None:
        """It cannot give way now: it is asked again as many steps later."""
        self._steps = 0

    def may_take(self, waiting: Collection[str]) -> bool:
        """Whether the window may be taken; ``waiting``: requests that are not let in yet."""
        self._before &= set(waiting)
        return not self._before


class NeighbourTurns:
    """Of one engine's window and the other models of its device. A wish of theirs is met within a step; one that is not
    met by the window's memory does not keep the long request from going on."""

    def __init__(self, steps: int = WINDOW_STEPS) -> None:
        self._most = steps
        self._steps = 0
        """With the window there."""
        self._step_s = self._back_s = 0.0
        self._again = False
        """They have had its memory and wish for more still."""

    def took(self) -> None:
        """The window is there from now on."""
        self._steps = 0

    def stepped(self, took_s: float) -> None:
        """A step of the long request is over, and took so long."""
        self._steps, self._step_s = self._steps + 1, took_s

    def gives_way(self, wished: bool) -> bool:
        """Whether the window's memory is for neighbours now, who wish (``wished``) for what nobody else can give."""
        self._again = self._again and wished
        return wished and self._steps >= (self._most if self._again else 1)

    def gave_way(self, now_s: float) -> None:
        """Its memory is free for them."""
        self._back_s, self._again = now_s + self._most * self._step_s, True

    def stays(self) -> None:
        """It cannot give way now: it is asked again after the most steps."""
        self._steps, self._again = 0, True

    def may_take(self, wished: bool, now_s: float) -> bool:
        """Whether the window may be wished for and taken."""
        self._again = self._again and wished
        return not self._again or now_s >= self._back_s
