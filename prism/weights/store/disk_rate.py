"""How fast the disk under a store is, measured in a moment."""

from __future__ import annotations

import mmap
import os
import time
import uuid
from pathlib import Path
from typing import Final

TRIAL_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 4 << 20


def read_rate(folder: Path) -> float:
    """Bytes per second of reading a file of :data:`TRIAL_BYTES` in ``folder`` past the page cache; 0 where that is not
    possible (no room, or a file system without direct reads: nothing says how fast its disk is)."""
    trial = folder / f".{uuid.uuid4().hex}.trial"
    try:
        with trial.open("xb") as stream:
            for _ in range(TRIAL_BYTES // _PIECE_BYTES):
                stream.write(os.urandom(_PIECE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        return _read(trial)
    except OSError:
        return 0.0
    finally:
        trial.unlink(missing_ok=True)


def _read(file: Path) -> float:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PIECE_BYTES) as buffer:
            start_s = time.perf_counter()
            while os.readv(descriptor, [buffer]):
                pass
            return TRIAL_BYTES / (time.perf_counter() - start_s)
    finally:
        os.close(descriptor)
