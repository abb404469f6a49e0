"""The folder in shared memory that is a machine's pool of KV: whose it is, what its files are called, how they go.

What is in it: :mod:`prism.kv.host_pool`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec

from prism.weights.store.locks import try_lock

SHARED_MEMORY: Final = Path("/dev/shm")
PART: Final = ".part-"
"""Begins the name of what a process is writing, or has claimed; its size ends it."""
ABOUT: Final = "about"
FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_OWNER: Final = ".accounts"
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
    give_back_tree(host_pool_directory(account_dir, root))


def claim_host_pool(account_dir: Path, root: Path = SHARED_MEMORY) -> Path:
    """The pool's directory, with whose it is written down; pools whose accounts are gone from the disk are removed."""
    mine = host_pool_directory(account_dir, root)
    mine.mkdir(mode=0o700, exist_ok=True)
    (mine / _OWNER).write_text(str(account_dir.resolve()))
    for other in root.glob(f"prism-kv-{os.getuid()}-*"):
        with contextlib.suppress(FileNotFoundError):
            if not Path((other / _OWNER).read_text()).is_dir():
                give_back_tree(other)
    return mine


def part_name(about: str) -> str:
    """A name that nobody else has for what this process writes; ``about`` ends it."""
    return f"{PART}{os.getpid()}-{next(_numbers)}-{time.time_ns()}-{about}"


def note_of(folder: Path) -> SpaceNote:
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=SpaceNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return SpaceNote()


def write_note(folder: Path, note: SpaceNote) -> None:
    """Whole or not at all; not where there is no memory, or no folder."""
    partial = folder / part_name("0")
    try:
        partial.write_bytes(msgspec.json.encode(note))
        partial.rename(folder / ABOUT)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, FileNotFoundError) and error.errno not in FULL:
            raise


def is_written(part: Path) -> bool:
    """Whether a living process writes it; the file of a dead one is removed."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        alive = not try_lock(fd, exclusive=True)
        if not alive:
            os.ftruncate(fd, 0)  # whoever has it mapped from the piece before
            part.unlink(missing_ok=True)
        return alive
    finally:
        os.close(fd)


def give_back(path: Path) -> bool:
    """Remove a file, and its pages at once, whoever has them mapped; where somebody holds a lock on it they go when
    that one has done. False: it was gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if try_lock(fd, exclusive=True):
            os.ftruncate(fd, 0)
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def give_back_tree(directory: Path) -> None:
    """Remove a pool: the files of its folders as :func:`give_back` does."""
    for folder in directory.glob("**/"):
        if folder != directory:
            for entry in os.scandir(folder):
                if entry.is_file():
                    give_back(Path(entry.path))
    shutil.rmtree(directory, ignore_errors=True)
