"""Devices and their accounts."""

from __future__ import annotations

import os
from pathlib import Path

from prism.memory import _kvcached
from prism.memory.owner import Owner
from prism.memory.stats import Audit, DeviceStats, device_stats

HOST_PAGE_BYTES = 2 << 20
"""Page of a host device unless told otherwise: the same as a GPU's, so that both behave alike."""


def default_account_dir() -> Path:
    """``$PRISM_ACCOUNT_DIR``, else a directory of this user in shared memory: accounts must not outlive a boot."""
    return Path(os.environ.get("PRISM_ACCOUNT_DIR") or f"/dev/shm/prism-{os.getuid()}")


class Device:
    """One device and the account that all its users share.

    Opening takes no device memory, starts no thread and does not initialise a GPU, so a process may open a device,
    fork, and the child may register owners on it. All users must see the same process ids (one PID namespace).
    """

    def __init__(self, name: str, core: _kvcached.CoreDevice) -> None:
        self.name = name
        self._core = core

    @property
    def capacity_bytes(self) -> int:
        """What all owners together may hold."""
        return self._core.capacity_bytes

    @property
    def page_bytes(self) -> int:
        """Granularity of pages on a host device."""
        return self._core.page_bytes

    @property
    def account_path(self) -> Path:
        """The account's file in shared memory."""
        return Path(self._core.account_path)

    def register(self, name: str, floor_bytes: int = 0, limit_bytes: int | None = None) -> Owner:
        """Enter this process as an owner; it leaves with ``close()`` or when the process ends, however that happens.

        ``floor_bytes`` are guaranteed from now on (``FloorUnavailable`` if they cannot be); ``limit_bytes`` is the most
        it may hold, ``None`` the device's capacity. Call it in the process that uses the memory, after any fork.
        """
        limit = _kvcached.NO_LIMIT if limit_bytes is None else limit_bytes
        return Owner(name, self._core.enter(name, floor_bytes, limit))

    def stats(self) -> DeviceStats:
        """The books at one instant."""
        return device_stats(self._core.stats())

    def audit(self) -> Audit:
        """Reap the dead, then compare the books with the kernel (host) or the driver (CUDA)."""
        books, total, free, problems = self._core.audit()
        known = total >= 0 and free >= 0
        return Audit(
            books=device_stats(books),
            driver_total_bytes=total if known else None,
            driver_free_bytes=free if known else None,
            problems=tuple(problems),
        )

    def reap(self) -> list[int]:
        """Give back what dead owners held; returns their ids. Refused and waiting callers do this by themselves."""
        return self._core.reap()

    def free_bytes(self) -> int:
        """Not charged to anyone, or lent and so back as soon as they are wanted; 0 at least. Reads shared memory;
        reserving is the only way to be sure of them."""
        return self._core.free_bytes()

    def wanted_bytes(self) -> int:
        """What waiting reservations and wishes ask for, over all owners. Two reads of shared memory."""
        return self._core.wanted_bytes()

    def foreign_bytes(self) -> int:
        """Of the capacity, what programs that are no owners were last found to hold."""
        return self._core.foreign_bytes()

    def outside_bytes(self) -> int:
        """What all owners take beside their pages: granted or measured, whichever is more. Reads shared memory."""
        return self._core.outside_bytes()

    def note_outside(self, owner_id: int, nbytes: int) -> None:
        """An owner's process was found to take so much outside its pages. A fact: it counts, granted or not. Raises
        ``UnknownOwner``."""
        self._core.note_outside(owner_id, nbytes)

    def note_foreign(self, nbytes: int) -> None:
        """Programs that are no owners were found to hold so much of the capacity. A fact: where it overdraws the
        device nothing more is granted and owners feel ``pressure()``."""
        self._core.note_foreign(nbytes)

    def set_limit(self, owner_id: int, limit_bytes: int | None) -> None:
        """Change any owner's limit; below what it holds, the owner feels ``pressure()`` and gets nothing more."""
        self._core.set_limit(owner_id, _kvcached.NO_LIMIT if limit_bytes is None else limit_bytes)

    def offer(self, keep_bytes: int | None) -> None:
        """Lend what is free beyond ``keep_bytes`` and wanted by nobody; ``None``: nothing, and what is lent is due."""
        self._core.offer(_kvcached.LENDS_NOTHING if keep_bytes is None else keep_bytes)

    def offered_bytes(self) -> int:
        """What could be lent now. Read without the lock; reserving is the only way to be sure of it."""
        return self._core.offered_bytes()


def open_device(
    name: str,
    capacity_bytes: int | None = None,
    *,
    account_dir: str | os.PathLike[str] | None = None,
    page_bytes: int = HOST_PAGE_BYTES,
    cuda_library: str | None = None,
) -> Device:
    """Attach to the account of ``host:N`` or ``cuda:N``, creating it if there is none.

    ``capacity_bytes`` ``None`` attaches only (``AccountMismatch`` if there is no account). Another capacity than the
    account's is refused while owners live and adopted when there are none. ``cuda_library`` names the driver library,
    normally found by itself.
    """
    directory = Path(account_dir) if account_dir is not None else default_account_dir()
    core = _kvcached.CoreDevice(name, capacity_bytes or 0, page_bytes, str(directory), cuda_library or "")
    return Device(name, core)
