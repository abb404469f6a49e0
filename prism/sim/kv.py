"""The KV memory of one engine: tokens in pages under the accounts of its devices (one per tensor-parallel shard)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from prism.sim.account import Account
from prism.sim.prefix import PrefixCache

_PADDING_TOKENS: Final = 1
"""The slot that engines write padding to lies in a page beside tokens."""


class KvMemory:
    """Elastic: pages follow use. ``share_bytes`` bounds them (a fixed share of each device).

    ``used_tokens`` are those of requests, including what a run of decode steps in progress has reserved ahead.
    Pages are packed: an engine with ``n`` tokens holds ``ceil(n * bytes_per_token / page)`` of them, and its first page
    from its start to its end (real engines keep the slot that padding is written to).

    What an engine has mapped ahead of use (:mod:`prism.policy.kv_ahead`), and what ran empty since it rested, is only
    counted (:meth:`mapped_bytes`): it is the first to go when anybody wants memory, so that it decides nothing.
    """

    __slots__ = (
        "_accounts",
        "_kept_pages",
        "_least_pages",
        "_page_bytes",
        "ahead_tokens",
        "bytes_per_token",
        "cache",
        "mapped_pages",
        "recall_run",
        "settled_tokens",
        "share_pages",
        "used_tokens",
    )

    def __init__(
        self, accounts: Sequence[Account], bytes_per_token: int, block_tokens: int, share_bytes: int | None = None
    ) -> None:
        self._accounts = tuple(accounts)
        self.bytes_per_token = bytes_per_token
        self._page_bytes = accounts[0].page_bytes
        self.cache = PrefixCache(block_tokens)
        self.used_tokens = 0
        self.mapped_pages = 0
        self.share_pages = None if share_bytes is None else share_bytes // self._page_bytes
        self.recall_run: Callable[[], None] = _nothing
        """Set by the engine: give back what its run has reserved ahead."""
        self.settled_tokens: Callable[[], int] = self._all_tokens
        """Set by the engine: tokens in use at this moment."""
        self.ahead_tokens: Callable[[], int] = _none
        """Set by the engine: tokens that it has mapped ahead of them."""
        self._least_pages = self._kept_pages = 0
        if all(account.free_pages or account.reclaim(1) for account in self._accounts) and self._take(1):
            self._least_pages = 1
        for account in self._accounts:
            account.tenants[self] = None

    @property
    def elastic(self) -> bool:
        """No fixed share."""
        return self.share_pages is None

    def close(self) -> None:
        """Give everything back."""
        self.used_tokens = 0
        self._least_pages = self._kept_pages = 0
        self._give(self.mapped_pages)
        for account in self._accounts:
            account.tenants.pop(self, None)
            account.waiters.pop(self, None)

    # --- requests ---

    def grow(self, tokens: int) -> bool:
        """Reserve ``tokens`` more, at the expense of caches and of other engines' reservations ahead if need be.
        False (nothing reserved) when they are not to be had."""
        need = self._missing_pages(tokens)
        if need > 0 and not self._take(need) and not self._take_from_others(tokens):
            return False
        self.used_tokens += tokens
        return True

    def shrink(self, tokens: int, quiet: bool = False) -> None:
        """Give ``tokens`` back; pages that are empty now go to the account. ``quiet``: they were only reserved ahead,
        so that nobody has to be told of free memory that was never in use."""
        self.used_tokens -= tokens
        self._trim(quiet)

    def to_cache(self, tokens: int) -> None:
        """``tokens`` in use are idle blocks of the cache now (which has counted them)."""
        self.used_tokens -= tokens

    def from_cache(self, tokens: int) -> None:
        """The inverse of :meth:`to_cache`."""
        self.used_tokens += tokens

    def room_tokens(self) -> int:
        """Tokens that could be reserved now without taking anything from a cache or another engine."""
        free = min([account.free_pages for account in self._accounts])
        return self._slots(free) - self.used_tokens - self.cache.idle_tokens

    def available_tokens(self) -> int:
        """Tokens that :meth:`grow` could get at most, what others cache or have reserved ahead included."""
        free = min(a.free_pages + a.ahead_pages() + a.idle_pages() for a in self._accounts)
        return self._slots(free - self.idle_pages() - self.ahead_pages()) - self.used_tokens

    def largest_tokens(self, beside_bytes: int) -> int:
        """Tokens this engine could hold if only its weights (``beside_bytes``) stood on each device."""
        pages = min(account.capacity_pages - account.pages(beside_bytes) for account in self._accounts)
        if self.share_pages is not None:
            pages = min(pages, self.share_pages)
        return pages * self._page_bytes // self.bytes_per_token

    def _slots(self, free_pages: int) -> int:
        """Tokens that fit into the mapped pages and ``free_pages`` more, as far as the share allows them."""
        pages = self.mapped_pages + free_pages
        if self.share_pages is not None:
            pages = min(pages, self.share_pages)
        return pages * self._page_bytes // self.bytes_per_token

    def wait(self, call: Callable[[], None]) -> None:
        """Call ``call`` soon after memory came back on one of the devices (once)."""
        for account in self._accounts:
            account.waiters[self] = call

    def free_tokens(self) -> int:
        """Tokens the engine can take without new device memory: room in its pages or its fixed share, and what it only
        caches."""
        if self.share_pages is not None:
            return self._slots(self.share_pages) - self.settled_tokens()
        used = self.settled_tokens()
        return self.pages_for(used + self.cache.idle_tokens) * self._page_bytes // self.bytes_per_token - used

    def busy_bytes(self) -> int:
        """Bytes on each device that requests and caches use; the page of an engine without any is not counted."""
        tokens = self.settled_tokens() + self.cache.idle_tokens
        return self.pages_for(tokens) * self._page_bytes if tokens else 0

    def mapped_bytes(self) -> int:
        """Bytes on each device at this moment: what requests and caches use, and what is mapped beyond that."""
        beyond = min(self._share_of(account) for account in self._accounts)
        return (self._needed_pages() + beyond) * self._page_bytes

    def note_ahead(self, tokens: int) -> None:
        """So much is mapped beyond what is in use, and stays so until :meth:`rest`."""
        pages = self.pages_for(self.used_tokens + self.cache.idle_tokens + tokens + _PADDING_TOKENS)
        if pages > self._kept_pages:
            self._kept_pages = pages

    def rest(self) -> None:
        """The engine has nothing to do: it unmaps what is empty."""
        self._kept_pages = 0

    def _share_of(self, account: Account) -> int:
        """Pages mapped beyond need, of an account that may not have as many as all its engines would like."""
        beyond = self.kept_pages()
        if beyond:
            free = account.free_pages + account.ahead_pages()
            wanted = sum(tenant.kept_pages() for tenant in account.tenants)
            return beyond if wanted <= free else beyond * free // wanted
        return 0

    def idle_bytes(self) -> int:
        return self.idle_pages() * self._page_bytes

    # --- for the account ---

    def ahead_pages(self) -> int:
        if self.mapped_pages == self._least_pages:
            return 0  # as most engines of a device are, which run nothing
        return self.mapped_pages - self._needed_pages()

    def kept_pages(self) -> int:
        kept, ahead = self._kept_pages, self.ahead_tokens()
        if ahead:
            kept = max(kept, self.pages_for(self.settled_tokens() + self.cache.idle_tokens + ahead + _PADDING_TOKENS))
        if self.share_pages is not None:
            kept = min(kept, self.share_pages)
        return max(0, kept - self._needed_pages())

    def _needed_pages(self) -> int:
        return self.pages_for(self.settled_tokens() + self.cache.idle_tokens)

    def idle_pages(self) -> int:
        idle = self.cache.idle_tokens
        if not idle:
            return 0
        used = self.settled_tokens()
        return self.pages_for(used + idle) - self.pages_for(used)

    def drop_cache_pages(self, pages: int) -> None:
        """Evict idle blocks until ``pages`` came back or none is left."""
        if self.cache.idle_tokens:
            self.cache.evict(-(-pages * self._page_bytes // self.bytes_per_token))
            self._trim()

    def recall(self) -> None:
        """Give back what is reserved ahead."""
        self.recall_run()

    # --- pages ---

    def pages_for(self, tokens: int) -> int:
        pages = -(-tokens * self.bytes_per_token // self._page_bytes)
        return pages if pages > self._least_pages else self._least_pages

    def _missing_pages(self, tokens: int) -> int:
        return self.pages_for(self.used_tokens + self.cache.idle_tokens + tokens) - self.mapped_pages

    def _take(self, pages: int) -> bool:
        if self.share_pages is not None and self.mapped_pages + pages > self.share_pages:
            return False
        accounts = self._accounts
        if len(accounts) > 1 and any(account.free_pages < pages for account in accounts):
            return False
        if not accounts[0].take(pages):
            return False
        for account in accounts[1:]:
            account.take(pages)
        self.mapped_pages += pages
        return True

    def _take_from_others(self, tokens: int) -> bool:
        need = self._missing_pages(tokens)
        if all(account.recall(need, self) for account in self._accounts) and self._take(need):
            return True
        if self.cache.idle_tokens:
            self.cache.evict(tokens)
            self._trim()
        need = self._missing_pages(tokens)
        if need <= 0:
            return True
        if self.share_pages is not None and self.mapped_pages + need > self.share_pages:
            return False
        if not all(account.reclaim(need, self) for account in self._accounts):
            return False
        return self._take(need)

    def _trim(self, quiet: bool = False) -> None:
        self._give(self.mapped_pages - self.pages_for(self.used_tokens + self.cache.idle_tokens), quiet)

    def _give(self, pages: int, quiet: bool = False) -> None:
        if pages > 0:
            self.mapped_pages -= pages
            for account in self._accounts:
                account.give(pages, quiet)

    def _all_tokens(self) -> int:
        return self.used_tokens


def _nothing() -> None:
    return None


def _none() -> int:
    return 0
