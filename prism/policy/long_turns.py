"""How the steps of a long request and those of all others take turns: by time, since one of its steps may take as long
as many of theirs (it reads all of its KV over a link). Pure.

::

    | others | long step of t |   others, for 3 t   | long step | ...      while others have work
    | long | long | long | ...                                           while they have none
"""

from __future__ import annotations

from typing import Final

LONG_SHARE: Final = 0.25
"""Of an engine's time that its long request gets while others have work. Their time per token is then 4/3 of what it is
alone, on average, and one of them is held up by one long step at most."""


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
