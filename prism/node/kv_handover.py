"""What a machine that leaves has stored of KV goes to others before it ends.

::

    machine that leaves             controller                      taker
    report: bytes by fingerprint -> chooses, once for each
                                    BringKv --------------------->  "kv-list", ... (prism.kv.exchange)
    waits for all of these <------- KvTakers
    <---------------------------------------------- "kv-taken" ---  has what it wants

An activation asks every machine of the fleet for KV, so that it does not matter whose pool it is in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from prism.kv.exchange import KvOffers

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05


class KvHandover:
    """For an agent's loop. Nothing happens until :meth:`run`."""

    def __init__(self, kv: KvOffers, changed: asyncio.Event) -> None:
        """``changed`` is set when there is something to report."""
        self._kv, self._changed = kv, changed
        self.held: dict[str, int] = {}
        """To be reported: bytes by fingerprint of the weights."""
        self._takers: dict[str, str] = {}

    def told(self, takers: Mapping[str, str]) -> None:
        """The controller's answer to a report with :attr:`held`; "" for what no machine can take."""
        self._takers |= takers

    async def run(self, limit_s: float) -> None:
        """Returns when others have what they want of all that is stored here, at once when they cannot, and after
        ``limit_s`` in any case. The log says what was given up."""
        self.held = await asyncio.to_thread(self._kv.hand_over)
        if not self.held:
            return
        log.info("%d bytes of KV wait for other machines, for %.0f s at most", sum(self.held.values()), limit_s)
        self._changed.set()
        for _ in range(int(limit_s / LOOK_S)):
            if not self._waits():
                break
            await asyncio.sleep(LOOK_S)
        for mark, nbytes in self.held.items():
            self._tell(mark, nbytes)

    def _waits(self) -> bool:
        return any(mark not in self._kv.taken and self._takers.get(mark) != "" for mark in self.held)

    def _tell(self, mark: str, nbytes: int) -> None:
        if (taken := self._kv.taken.get(mark)) is not None:
            node, here = taken
            log.info("%s has %d of %d bytes of KV of the weights %s", node, here, nbytes, mark)
            return
        match self._takers.get(mark):
            case None:
                why = "the controller named nobody to take it"
            case "":
                why = "no other machine keeps KV"
            case taker:
                why = f"{taker} had not taken it"
        log.warning("gave up %d bytes of KV of the weights %s: %s", nbytes, mark, why)
