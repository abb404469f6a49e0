"""What a machine that leaves has stored of KV goes to others before it ends.

::

    machine that leaves             controller                      taker
    report: bytes by fingerprint -> chooses, once for each
                                    BringKv --------------------->  "kv-list", ... (prism.kv.exchange)
    waits for all of these <------- KvTakers
    <---------------------------------------------- "kv-taken" ---  has what it wants

A taker that says it cannot go on, or of which nothing is heard, is given up: the report names it, and the controller
another one, as long as there is one. A controller that answers nothing is given up, too.

An activation asks every machine of the fleet for KV, so that it does not matter whose pool it is in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from prism.kv.exchange import KvOffers

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
STALL_S: Final = 5.0
"""A taker that has asked for nothing and taken nothing for so long is given up. What it takes after all counts."""
SILENT_S: Final = 10.0
"""A controller that has answered nothing for so long is given up: the next one waits for the lease of a dead one to end
(5 s), and its supervisor starts it within a second or two."""


class KvHandover:
    """For an agent's loop. Nothing happens until :meth:`run`."""

    def __init__(self, kv: KvOffers, changed: asyncio.Event) -> None:
        """``changed`` is set when there is something to report."""
        self._kv, self._changed = kv, changed
        self.held: dict[str, int] = {}
        """To be reported: bytes by fingerprint of the weights."""
        self.failed: dict[str, list[str]] = {}
        """To be reported: takers that were given up."""
        self._takers: dict[str, str] = {}
        self._named_s: dict[str, float] = {}
        self._answered_s = 0.0

    def told(self, takers: Mapping[str, str]) -> None:
        """The controller's answer to a report with :attr:`held`; "" for what no machine can take. One that takes it
        already is not dropped for that: a controller that has just begun may not know it, and if it is gone nothing is
        heard of it."""
        now_s = self._answered_s = time.monotonic()
        for mark, taker in takers.items():
            known = self._takers.get(mark)
            if taker not in self.failed.get(mark, ()) and known != taker and (taker or known is None):
                self._takers[mark], self._named_s[mark] = taker, now_s

    async def run(self, limit_s: float) -> None:
        """Returns when others have what they want of all that is stored here, when they cannot, and after ``limit_s``
        in any case. The log says what was given up."""
        self.held = await asyncio.to_thread(self._kv.hand_over)
        if not self.held:
            return
        log.info("%d bytes of KV wait for other machines, for %.0f s at most", sum(self.held.values()), limit_s)
        self._answered_s = time.monotonic()
        self._changed.set()
        for _ in range(int(limit_s / LOOK_S)):
            if not self._waits(time.monotonic()):
                break
            await asyncio.sleep(LOOK_S)
        for mark, nbytes in self.held.items():
            self._tell(mark, nbytes)

    def _waits(self, now_s: float) -> bool:
        silent = now_s - self._answered_s > SILENT_S
        left = [mark for mark in self.held if mark not in self._kv.taking.taken and self._takers.get(mark) != ""]
        for mark in left:
            if why := self._given_up(mark, now_s):
                self._give_up(mark, why)
        return any(mark in self._takers or not silent for mark in left)

    def _given_up(self, mark: str, now_s: float) -> str:
        """Why its taker is; "": it is not."""
        taker, taking = self._takers.get(mark), self._kv.taking
        if taker is None:
            return ""
        if taking.broken.get(mark) == taker:
            return "it cannot go on"
        quiet_s = now_s - max(taking.heard_s(mark), self._named_s[mark])
        return f"nothing was heard of it for {quiet_s:.0f} s" if quiet_s > STALL_S else ""

    def _give_up(self, mark: str, why: str) -> None:
        taker = self._takers.pop(mark)
        log.warning("%s does not take KV of the weights %s: %s", taker, mark, why)
        self.failed = self.failed | {mark: [*self.failed.get(mark, ()), taker]}
        self._changed.set()

    def _tell(self, mark: str, nbytes: int) -> None:
        if (taken := self._kv.taking.taken.get(mark)) is not None:
            node, here = taken
            log.info("%s has %d of %d bytes of KV of the weights %s", node, here, nbytes, mark)
            return
        failed = ", ".join(self.failed.get(mark, ()))
        match self._takers.get(mark):
            case None:
                why = "the controller named nobody to take it"
            case "":
                why = "no other machine keeps KV"
            case taker:
                why = f"{taker} had not taken it"
        why += f" after {failed}" if failed else ""
        log.warning("gave up %d bytes of KV of the weights %s: %s", nbytes, mark, why)
