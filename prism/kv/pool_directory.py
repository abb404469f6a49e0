"""The folder in shared memory that is a machine's pool of KV: whose it is, what is noted of its spaces, how it goes.

What is in it: :mod:`prism.kv.host_pool`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Final

import msgspec

from prism.memory._kvcached import PieceIndex

SHARED_MEMORY: Final = Path("/dev/shm")
FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_OWNER: Final = ".accounts"
_NOTES: Final = "notes"
_LEAST_SLOTS: Final = 4096
_SLOT_FOR_BYTES: Final = 32 << 10
"""Pieces are larger than this, but for a few."""
_LEAST_VIRTUAL_BYTES: Final = 64 << 30
_VIRTUAL: Final = 16
"""Addresses of the pool's memory are so many times its bound, which costs nothing: where pieces of several sizes come
and go there is a gap for each, and a bound that is larger at the next start has room."""
_numbers = itertools.count()


class SpaceNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a space beside its name."""

    weights: str = ""
    """Whose KV: the weights' fingerprint, a space, and how they are split and typed."""
    recompute_s_per_byte: float = 1e-9
    """What computing its KV takes, for the order in which pieces are dropped."""


def host_pool_directory(account_dir: Path, root: Path = SHARED_MEMORY) -> Path:
    """The pool of the machine whose devices have their accounts in ``account_dir``."""
    tag = hashlib.sha256(str(account_dir.resolve()).encode()).hexdigest()[:12]
    return root / f"prism-kv-{os.getuid()}-{tag}"


def drop_host_pool(account_dir: Path, root: Path = SHARED_MEMORY) -> None:
    """Gives all memory of the pool back. Readers that have pieces open keep those."""
    end_pool(host_pool_directory(account_dir, root))


def claim_host_pool(account_dir: Path, root: Path = SHARED_MEMORY) -> Path:
    """The pool's directory, with whose it is written down; pools whose accounts are gone from the disk are removed."""
    mine = host_pool_directory(account_dir, root)
    mine.mkdir(mode=0o700, exist_ok=True)
    (mine / _OWNER).write_text(str(account_dir.resolve()))
    for other in root.glob(f"prism-kv-{os.getuid()}-*"):
        with contextlib.suppress(FileNotFoundError):
            if not Path((other / _OWNER).read_text()).is_dir():
                end_pool(other)
    return mine


def open_index(directory: Path, bound_bytes: int) -> PieceIndex:
    """The index of the pool there, made for ``bound_bytes`` if it is not. Raises ``OSError``."""
    slots = max(_LEAST_SLOTS, bound_bytes // _SLOT_FOR_BYTES)
    return PieceIndex(str(directory), slots, max(_LEAST_VIRTUAL_BYTES, _VIRTUAL * bound_bytes))


def end_pool(directory: Path) -> None:
    """Remove a pool, and its memory at once, whoever has it mapped; what somebody reads or has claimed goes when that
    one has done, and nothing is taken in any more."""
    if (directory / "index").exists():
        with contextlib.suppress(OSError):  # another version's: its memory goes with its processes
            open_index(directory, 0).end()
    shutil.rmtree(directory, ignore_errors=True)


def noted_spaces(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory / _NOTES) if not name.startswith(".")]  # noqa: PTH208
    except FileNotFoundError:
        return []


def note_of(directory: Path, space: str) -> SpaceNote:
    try:
        return msgspec.json.decode((directory / _NOTES / space).read_bytes(), type=SpaceNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return SpaceNote()


def write_note(directory: Path, space: str, note: SpaceNote) -> None:
    """Whole or not at all; not where there is no memory, or no pool any more."""
    folder = directory / _NOTES
    partial = folder / f".{os.getpid()}-{threading.get_ident()}-{next(_numbers)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(note))
        partial.rename(folder / space)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, FileNotFoundError) and error.errno not in FULL:
            raise
