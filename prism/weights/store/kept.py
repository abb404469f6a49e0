"""Which copies in host memory are the fleet's: written by the machine's agent, read by whoever makes room.

They leave last (:mod:`prism.weights.store.reclaim`): other machines count on them.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from prism.weights.packs.format import PackKey

_FILE: Final = ".kept"


def write_kept(host_directory: Path, keys: Collection[PackKey]) -> None:
    """Replaces what stood there."""
    partial = host_directory / f"{_FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(sorted(keys)))
    partial.replace(host_directory / _FILE)


def read_kept(host_directory: Path) -> frozenset[PackKey]:
    """Nothing where no agent of a fleet has said anything."""
    try:
        return frozenset(msgspec.json.decode((host_directory / _FILE).read_bytes(), type=list[PackKey]))
    except FileNotFoundError:
        return frozenset()
