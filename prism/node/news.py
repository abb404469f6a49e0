"""Something has changed, for whoever waits for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class News:
    """Of one loop. Nothing is missed between a look at what may change and the wait for it: whoever looks notes
    :attr:`number` before."""

    def __init__(self) -> None:
        self.number = 0
        """Of changes so far."""
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """It has changed."""
        self.number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def since(self, number: int, most_s: float) -> None:
        """Returns when there have been more than ``number`` changes, or after ``most_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.number == number:
                    await self._changed.wait()

    async def next(self, most_s: float) -> None:
        """Returns at the next change, or after ``most_s``."""
        await self.since(self.number, most_s)
