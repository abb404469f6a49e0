"""How much a store may hold. Written into the store by whoever runs the machine, so that every process that opens it
(engines, the agent, ``prism pack``) keeps to the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
import psutil

from prism.weights.store.shared_memory import SHARED_MEMORY

_FILE: Final = "budget.json"
_MOST_OF_SHARED_MEMORY: Final = 0.95
"""The file system in shared memory has bounds of its own; a little of it is for the store's and others' small files."""


class Budget(msgspec.Struct, frozen=True):
    """Bytes; None: as much as the file system has."""

    disk_bytes: int | None = None
    host_bytes: int | None = None


def share_of_memory(fraction: float, root: Path = SHARED_MEMORY) -> int:
    """Bytes that are ``fraction`` of this machine's memory, at most what fits into the file system at ``root``."""
    room = os.statvfs(root)
    fits = int(room.f_blocks * room.f_frsize * _MOST_OF_SHARED_MEMORY)
    return min(int(psutil.virtual_memory().total * fraction), fits)


def write_budget(directory: Path, budget: Budget) -> None:
    """For the store in ``directory``; stores that are open keep what they have read."""
    partial = directory / f"{_FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(budget))
    partial.replace(directory / _FILE)


def read_budget(directory: Path) -> Budget:
    """That of the store in ``directory``; without one there are no bounds."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=Budget)
    except FileNotFoundError:
        return Budget()
