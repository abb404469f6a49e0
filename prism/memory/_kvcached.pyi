"""Types of the extension built from csrc/kvcached; documented there and in the wrappers of this package."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prism.memory.layout import KvLayout

NO_LIMIT: int
LENDS_NOTHING: int

Group: TypeAlias = tuple[int, int, int, int, int, bool, int, int, int, int]
Page: TypeAlias = tuple[int, int, int]
Slots: TypeAlias = Any  # one-dimensional int64: numpy, torch (CPU), any buffer; for free() also a sequence of ints

def stream_copy(destination_address: int, source_address: int, nbytes: int) -> None:
    """Copy past the caches between two addresses of this process; the ranges must not overlap."""

def gather_rows(
    packed_address: int, base_address: int, stride_bytes: int, width_bytes: int, rows: Slots, streamed: bool = False
) -> None:
    """Copy rows of host memory into packed bytes, in the order of ``rows``; without Python's lock. ``streamed``: past
    the caches."""

def scatter_rows(base_address: int, stride_bytes: int, width_bytes: int, rows: Slots, packed_address: int) -> None:
    """Copy packed bytes to rows of host memory; without Python's lock."""

def gather_summed_rows(
    packed_address: int, base_address: int, stride_bytes: int, width_bytes: int, rows: Slots, streamed: bool = False
) -> int:
    """As :func:`gather_rows`; returns XXH3 of the packed bytes. Raises ``ValueError`` for fewer than 241."""

def scatter_summed_rows(
    base_address: int, stride_bytes: int, width_bytes: int, rows: Slots, packed_address: int
) -> int:
    """As :func:`scatter_rows`; returns XXH3 of the packed bytes. Raises ``ValueError`` for fewer than 241."""

class CoreDevice:
    def __init__(
        self, name: str, capacity_bytes: int, page_bytes: int, account_dir: str, cuda_library: str
    ) -> None: ...
    def enter(self, name: str, floor_bytes: int, limit_bytes: int) -> CoreOwner: ...
    def stats(self) -> dict[str, Any]: ...
    def audit(self) -> tuple[dict[str, Any], int, int, list[str]]: ...
    def reap(self) -> list[int]: ...
    def free_bytes(self) -> int: ...
    def wanted_bytes(self) -> int: ...
    def foreign_bytes(self) -> int: ...
    def outside_bytes(self) -> int: ...
    def note_outside(self, owner_id: int, nbytes: int) -> None: ...
    def note_foreign(self, nbytes: int) -> None: ...
    def set_limit(self, owner_id: int, limit_bytes: int) -> None: ...
    def offer(self, keep_bytes: int) -> None: ...
    def offered_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def account_path(self) -> str: ...

class CoreOwner:
    @property
    def id(self) -> int: ...
    @property
    def usable(self) -> bool: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def floor_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def spare_bytes(self) -> int: ...
    def reserve(self, nbytes: int, klass: str, timeout_s: float, yielding: bool = False) -> None: ...
    def wish(self, least_bytes: int, most_bytes: int, since_ns: int = 0) -> int: ...
    @property
    def wished_bytes(self) -> int: ...
    @property
    def owed_bytes(self) -> int: ...
    def release(self, nbytes: int, klass: str) -> None: ...
    def held(self, klass: str) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    def pressure(self) -> int: ...
    def excess(self) -> int: ...
    def close(self) -> None: ...
    def die_inside_lock(self, nbytes: int, after_total: bool) -> None: ...

class Fence:
    """Something in flight on a host device; signal() when it has passed."""

    def __init__(self) -> None: ...
    def signal(self) -> None: ...
    def passed(self) -> bool: ...

class Pool:
    """Slots of a KV cache whose pages come and go with use. Thread-safe."""

    @property
    def address(self) -> int:
        """Where the arena's range starts; region offsets count from here."""
    @property
    def regions(self) -> list[tuple[int, int, int]]:
        """(offset_bytes, row_bytes, bytes) of each region."""
    @property
    def page_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes by which the pool grows and shrinks."""
    @property
    def block_slots(self) -> int:
        """Slots that every block has at least."""
    @property
    def blocks(self) -> int: ...
    @property
    def max_slots(self) -> int:
        """Most slots in use at once."""
    @property
    def slot_ids(self) -> int:
        """Ids are below this; more than max_slots."""
    @property
    def slot_bytes(self) -> int: ...
    @property
    def rows(self) -> int:
        """Rows of each K and V view."""
    @property
    def virtual_bytes(self) -> int: ...
    @property
    def lease_bytes(self) -> int:
        """Bytes held in the account."""
    @property
    def is_open(self) -> bool: ...
    @property
    def layout(self) -> KvLayout:
        """The sizes it was divided with."""
    def memory(self) -> Any:
        """The bytes from ``address`` to the end of the last region, with ``__dlpack__``."""
    def stats(self) -> dict[str, int]:
        """Bytes by state and counters."""
    def check(self) -> None:
        """Verify every invariant of the books; BadRequest says what is wrong."""
    def available(self) -> int:
        """Slots that alloc() will not refuse: covered by the lease, whatever other processes do."""
    def used(self) -> int: ...
    def scattered(self) -> int:
        """Free slots in blocks that have some in use: part of ``available()``, but with neighbours."""
    def pressure(self) -> int:
        """Bytes the owner should give back now. Takes no lock."""
    def alloc(self, count: int, fresh: bool = False) -> npt.NDArray[np.int64]:
        """``count`` slots; never slot 0. All or nothing: OutOfMemory.

        ``fresh``: from empty blocks as far as there are any, for a sequence that goes on with ``alloc_after``.
        """
    def alloc_after(self, last: Slots) -> npt.NDArray[np.int64]:
        """The next slot of each sequence, given its last: in its block, else in an empty one, else in the fullest.

        A last below 1, or given back meanwhile, is a sequence without a block. ForeignSlot, OutOfMemory: no change.
        """
    def alloc_into(self, buffer: Slots, fresh: bool = False) -> None:
        """Fill an int64 array with slots, as ``alloc``. All or nothing: OutOfMemory."""
    def free(self, slots: Slots) -> None:
        """Give slots back, all or nothing: DoubleFree, ForeignSlot."""
    def reset(self) -> None:
        """Every slot is free again, as if each had been given back."""
    def quiesce(self) -> None:
        """Do now what is due: unmap surplus whose fences have passed, give back lease; wait for the helper thread."""
    def set_lease(self, lease_bytes: int) -> None:
        """Hold this much from now on: growing is atomic, shrinking a target worked down to."""
    def ensure(self, slots: int, yielding: bool = False) -> bool:
        """Grow the lease until ``slots`` are available; False, and no change, if refused.

        ``yielding``: only by memory that no wish which goes before this owner needs.
        """
    def back(self, slots: int, fresh: bool = False) -> bool:
        """Put pages behind the next ``slots`` slots of the lease (``fresh``: in empty blocks).

        False: the device is full in spite of the account. Then the lease is what is mapped, and the rest went back.
        """
    def give_back(self, keep_slots: int = 0, most_bytes: int = ...) -> int:
        """Shrink the lease by what is not in use; returns bytes given to the account by now."""
    def trim(self) -> int:
        """Give back the whole unused lease, destroy spare pages; returns bytes given to the account."""
    def set_ahead(self, low_bytes: int, high_bytes: int | None) -> None:
        """Keep between low and high bytes mapped with no slot in use."""
    def fence_with(self, fence: Fence | None) -> None:
        """Blocks that run empty from now on keep their pages until the fence has been signalled."""
    def defer_on_stream(self, stream: int) -> None:
        """Blocks that run empty from now on keep their pages until the CUDA stream's work so far is done."""
    def close(self) -> None:
        """Unmap everything and give the lease back."""

class CoreArena:
    def __init__(self, owner: CoreOwner, virtual_bytes: int) -> None: ...
    def divide(self, groups: list[Group], timeout_s: float) -> list[Pool]: ...
    def close(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def virtual_bytes(self) -> int: ...

class CoreWeightRegion:
    def __init__(self, owner: CoreOwner, nbytes: int, page_bytes: int, exportable: bool, klass: str) -> None: ...
    def commit(self, offset_bytes: int, nbytes: int, timeout_s: float) -> int: ...
    def decommit(self, offset_bytes: int, nbytes: int) -> int: ...
    def close(self) -> None: ...
    def export_pages(self) -> list[Page]: ...
    def memory(self) -> Any: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...

class CoreImportedRegion:
    def __init__(self, owner: CoreOwner, pages: list[Page]) -> None: ...
    def close(self) -> None: ...
    def memory(self) -> Any: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
