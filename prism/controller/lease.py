"""The right to decide: one controller has it at a time, for some seconds, and renews it as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from prism.store.interface import Store
from prism.store.values import ControllerRecord, LeaseLost, StoreUnavailable

log = logging.getLogger(__name__)

LEASE_S: Final = 5.0
RETRY_S: Final = 0.2


class ControllerLease:
    """:meth:`take` it before anything is decided, :meth:`hold` it beside the work, :meth:`give_back` at the end.

    Args:
        consumer: the controller's name in the store.
        address: where its mailbox listens, for those that look the controller up.
    """

    def __init__(self, store: Store, consumer: str, address: str) -> None:
        self._store, self._consumer, self._address = store, consumer, address
        self.holder: ControllerRecord
        """As the store has it; set by :meth:`take`."""

    async def take(self) -> None:
        """Waits until no other controller has it."""
        while True:
            try:
                holder = await self._acquire()
            except StoreUnavailable:
                holder = None
            if holder is not None:
                log.info("this controller has the lease (fence %d)", holder.fence)
                self.holder = holder
                return
            await asyncio.sleep(RETRY_S)

    async def hold(self) -> None:
        """Renews it until cancelled. Raises :class:`LeaseLost` when another controller took over."""
        while True:
            await asyncio.sleep(LEASE_S / 5)
            try:
                await self.renew()
            except StoreUnavailable as error:
                log.warning("the store is away: %s", error)

    async def renew(self) -> None:
        """A process that stood still for so long that its lease ended takes it again: fences are counted, so that it
        sees whether another controller decided anything in between (:class:`LeaseLost`)."""
        if await self._store.renew_lease(self.holder, LEASE_S):
            return
        again = await self._acquire()
        if again is None or again.fence > self.holder.fence + 1:
            raise LeaseLost(f"another controller took over from {self._consumer}")
        log.warning("the lease had ended before it was renewed (fence %d now)", again.fence)
        self.holder = again

    async def give_back(self) -> None:
        """The next controller need not wait until it runs out."""
        await self._store.release_lease(self.holder)

    async def _acquire(self) -> ControllerRecord | None:
        return await self._store.acquire_lease(self._consumer, self._address, LEASE_S)
