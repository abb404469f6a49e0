"""Owners: what one process holds on one device."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from prism.memory import _kvcached
from prism.memory.arena import Arena
from prism.memory.region import GPU_REGION_PAGE_BYTES, ImportedRegion, WeightRegion

Klass = Literal["weights", "kv", "staging", "outside", "lent"]
"""``outside``: what the process takes of the device beside its pages; no limit and no floor is about it. ``lent``: KV
of an engine of another device."""


class Owner:
    """An entry in a device's account, and the maker of arenas and weight regions that are charged to it.

    Arenas, pools and regions account for themselves; ``reserve`` and ``release`` are for memory that something else
    allocates (activations, staging buffers, weights that a framework loads itself).
    """

    def __init__(self, name: str, core: _kvcached.CoreOwner) -> None:
        self.name = name
        self._core = core

    @property
    def id(self) -> int:
        """Names this owner for ``Device.set_limit`` in any process; never reused while the account exists."""
        return self._core.id

    @property
    def leased_bytes(self) -> int:
        """Held in the books, over all classes but ``outside``."""
        return self._core.held_bytes

    @property
    def floor_bytes(self) -> int:
        """Guaranteed bytes."""
        return self._core.floor_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The most it may hold, ``None`` without a limit."""
        return self._core.limit_bytes

    @property
    def spare_bytes(self) -> int:
        """Physical pages without an address, kept for the next map."""
        return self._core.spare_bytes

    def held(self, klass: Klass) -> int:
        """Bytes held in the books for one class."""
        return self._core.held(klass)

    def reserve(self, nbytes: int, klass: Klass, timeout_s: float = 0.0, *, yielding: bool = False) -> None:
        """Add to the books, atomically and exclusively: ``OutOfMemory`` or ``LimitExceeded``, and then nothing changed.

        With a timeout it waits for memory to come back, and meanwhile other owners feel ``pressure()``. ``yielding``
        (it never waits): only what no wish that goes before this owner needs.
        """
        self._core.reserve(nbytes, klass, timeout_s, yielding)

    def wish(self, least_bytes: int, most_bytes: int, since_ns: int = 0) -> int:
        """Wish for ``most_bytes`` more KV; less than ``least_bytes`` would be of no use. ``wish(0, 0)`` withdraws.

        The wish stands until it is replaced, has come true (KV that is reserved is taken off it) or its owner is gone,
        and is felt as ``pressure()`` by owners that have none and by those that hold more KV. Returns what stands: at
        most what could become free if all others gave
        back what they can, 0 if ``least_bytes`` could not. Of owners that hold alike the older wish goes first:
        ``since_ns`` on the monotonic clock, the same from all ranks of one engine; 0: since there has been a wish.
        """
        return self._core.wish(least_bytes, most_bytes, since_ns)

    @property
    def wished_bytes(self) -> int:
        """The wish that stands."""
        return self._core.wished_bytes

    @property
    def owed_bytes(self) -> int:
        """What others wish for that go before this owner: all of them, if it has no wish itself."""
        return self._core.owed_bytes

    def release(self, nbytes: int, klass: Klass) -> None:
        """Take off the books and wake those who wait; ``OverRelease`` for more than is held."""
        self._core.release(nbytes, klass)

    def pressure(self) -> int:
        """Bytes this owner should give back now: over its limit, or others wait or wish before it and it holds more
        than its floor."""
        return self._core.pressure()

    def excess(self) -> int:
        """The part of it above this owner's own limit."""
        return self._core.excess()

    def arena(self, virtual_bytes: int) -> Arena:
        """Reserve address space for KV caches; it costs no memory."""
        return Arena(_kvcached.CoreArena(self._core, virtual_bytes))

    @property
    def device(self) -> str:
        """The device's name: ``host:0``."""
        return self._core.device

    @property
    def page_bytes(self) -> int:
        """The device's granule: 2 MiB on a GPU."""
        return self._core.page_bytes

    def weight_region(self, nbytes: int, *, page_bytes: int | None = None, exportable: bool = False) -> WeightRegion:
        """Reserve address space for weights; ``commit()`` puts memory behind it, in pages of ``page_bytes``.

        By default these are the granule on a host device and 32 MiB on a GPU, where every page costs driver calls.
        ``exportable``: for ``export_pages()``; on a GPU such pages cost more.
        """
        if page_bytes is None:
            page_bytes = self.page_bytes if self._core.device.startswith("host:") else GPU_REGION_PAGE_BYTES
        core = _kvcached.CoreWeightRegion(self._core, nbytes, min(page_bytes, nbytes), exportable, "weights")
        return WeightRegion(core)

    def lent_region(self, nbytes: int) -> WeightRegion:
        """Reserve address space for KV of engines of other devices, charged here as *lent*.

        ``commit()`` raises ``OutOfMemory`` beyond what the device offers (:meth:`Device.offer`) and never waits; this
        owner's ``pressure()`` then says what is wanted back, before any other owner of the device feels any.
        """
        core = _kvcached.CoreWeightRegion(self._core, nbytes, min(self.page_bytes, nbytes), False, "lent")
        return WeightRegion(core)

    def staging_region(self, nbytes: int, page_bytes: int) -> WeightRegion:
        """Reserve address space for bytes on their way to another device, charged as *staging*: for ``export_pages()``,
        one page of ``page_bytes`` (whole granules) after the other. ``commit()`` as of :meth:`window_region`."""
        return WeightRegion(_kvcached.CoreWeightRegion(self._core, nbytes, page_bytes, True, "staging"))

    def window_region(self, nbytes: int) -> WeightRegion:
        """Reserve address space for buffers through which data passes, charged as *staging*. ``commit()`` never waits
        and takes only what no wish that goes before this owner's needs; others wish for staging as for KV."""
        core = _kvcached.CoreWeightRegion(self._core, nbytes, min(self.page_bytes, nbytes), False, "staging")
        return WeightRegion(core)

    def import_region(self, pages: list[tuple[int, int, int]]) -> ImportedRegion:
        """Map pages that another process exported (``WeightRegion.export_pages``; descriptors sent over a socket)."""
        return ImportedRegion(_kvcached.CoreImportedRegion(self._core, pages))

    def close(self) -> None:
        """Close arenas and regions, stop the helper thread, give everything back. Safe to call again."""
        self._core.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
