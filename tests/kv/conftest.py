"""Fixtures of tests of KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory: files there take the memory of their pages and no more."""
    with TemporaryDirectory(dir="/dev/shm", prefix="prism-test-") as made:
        yield Path(made)
