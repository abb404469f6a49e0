"""The same tests run over both stores; the Redis ones start the embedded server (marker ``redis``)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prism.store.connect import open_store
from prism.store.embedded import EmbeddedServer
from prism.store.interface import Store
from prism.store.memory import MemoryStore
from tests.patience import PATIENCE_S


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a unix socket's name (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="prism-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    path = Path(tempfile.mkdtemp(prefix="prism-"))
    embedded = EmbeddedServer(path)
    embedded.start(PATIENCE_S)
    yield embedded
    embedded.stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    embedded: EmbeddedServer = request.getfixturevalue("server")
    opened = open_store(embedded.url, retry_s=PATIENCE_S)
    await opened._conn.client.flushall()  # type: ignore[attr-defined]
    yield opened
    await opened.aclose()
