"""The folder in shared memory that belongs to a store. Shared memory has no owner that cleans up: stores do it here."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_OWNER: Final = ".store"


def default_host_directory(directory: Path, root: Path = SHARED_MEMORY) -> Path:
    """The shared-memory folder of the store in ``directory``: the same for every process of this user."""
    tag = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    return root / f"prism-weights-{os.getuid()}-{tag}"


def claim_shared(host_directory: Path, directory: Path) -> None:
    """Writes down whose copies these are, and removes the copies of stores that no longer exist on disk."""
    owner = host_directory / _OWNER
    if not owner.exists():
        owner.write_text(str(directory.resolve()))
    for other in host_directory.parent.glob(f"prism-weights-{os.getuid()}-*"):
        try:
            store = Path((other / _OWNER).read_text())
        except FileNotFoundError:
            continue
        if not store.is_dir():
            shutil.rmtree(other, ignore_errors=True)


def drop_shared(directory: Path, root: Path = SHARED_MEMORY) -> None:
    """Gives the host memory of the store in ``directory`` back. Processes that have copies mapped keep those pages."""
    shutil.rmtree(default_host_directory(directory, root), ignore_errors=True)
