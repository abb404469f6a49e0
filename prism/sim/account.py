"""The account of one device: physical pages that weights and KV of all its engines are taken from.

``free_pages`` is what nobody has reserved. Engines reserve the pages of a whole run of decode steps ahead
(:mod:`prism.sim.engine`); what of it they do not use yet is *ahead*, counted as free wherever somebody looks, and given
back at once when somebody else needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prism.sim.queue import EventQueue


class Tenant(Protocol):
    """The KV memory of one engine, as the accounts of its devices see it. Pages are those on each device."""

    def ahead_pages(self) -> int:
        """Reserved for a run in progress and not used yet."""
        ...

    def kept_pages(self) -> int:
        """Mapped beyond all need, where there is room: counted, never reserved."""
        ...

    def idle_pages(self) -> int:
        """Only caching prefixes."""
        ...

    def recall(self) -> None:
        """Give back what is reserved ahead."""
        ...

    def drop_cache_pages(self, pages: int) -> None:
        """Evict idle blocks until ``pages`` came back or none is left."""
        ...


class Account:
    """Pages of one device. Owned by its :class:`prism.sim.device.SimDevice`."""

    __slots__ = ("_queue", "_wake", "capacity_pages", "free_pages", "page_bytes", "tenants", "waiters")

    def __init__(self, queue: EventQueue, memory_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.capacity_pages = memory_bytes // page_bytes
        self.free_pages = self.capacity_pages
        self.tenants: dict[Tenant, None] = {}
        """KV memories with a shard here, in order of arrival."""
        self.waiters: dict[Tenant, Callable[[], None]] = {}
        """Called once, soon after pages came back."""
        self._wake = queue.alarm(self._wake_waiters)
        self._queue = queue

    def pages(self, nbytes: int) -> int:
        """Pages that hold ``nbytes``."""
        return -(-nbytes // self.page_bytes)

    def take(self, pages: int) -> bool:
        """Reserve ``pages``; False (and nothing happens) when there are not so many."""
        if pages > self.free_pages:
            return False
        self.free_pages -= pages
        return True

    def give(self, pages: int, quiet: bool = False) -> None:
        """Give ``pages`` back; ``quiet`` wakes nobody who waits."""
        self.free_pages += pages
        if self.waiters and not quiet:
            self._wake.set(self._queue.now_s)

    def _wake_waiters(self, _: object) -> None:
        waiters, self.waiters = self.waiters, {}
        for call in waiters.values():
            call()

    def recall(self, pages: int, asking: Tenant | None = None) -> bool:
        """Make ``pages`` free from what others reserved ahead (were steps taken singly, it would be free)."""
        for tenant in self.tenants:
            if self.free_pages < pages and tenant is not asking:
                tenant.recall()
        return self.free_pages >= pages

    def reclaim(self, pages: int, asking: Tenant | None = None) -> bool:
        """Make ``pages`` free: first what others reserved ahead, then what they only cache. False when that is not
        enough; then nothing in use was touched."""
        self.recall(pages, asking)
        for tenant in self.tenants:
            if self.free_pages < pages and tenant is not asking:
                tenant.drop_cache_pages(pages - self.free_pages)
        return self.free_pages >= pages

    def ahead_pages(self) -> int:
        """Pages that are reserved for runs in progress and not used yet."""
        return sum([tenant.ahead_pages() for tenant in self.tenants])

    def kept_pages(self) -> int:
        """Pages that engines have mapped beyond need, as far as there are free ones."""
        kept = sum(tenant.kept_pages() for tenant in self.tenants)
        return min(kept, self.free_pages + self.ahead_pages()) if kept else 0

    def idle_pages(self) -> int:
        """Pages that only cache prefixes."""
        return sum([tenant.idle_pages() for tenant in self.tenants])

    def free_bytes(self) -> int:
        """What any engine here may take now."""
        return (self.free_pages + self.ahead_pages() + self.idle_pages()) * self.page_bytes
