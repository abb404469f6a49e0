"""The short kill storm; `make storm` runs one of any length."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server, start
from .storm import storm, storm_catalog

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 60.0
SEED = int(os.environ.get("PRISM_STORM_SEED", secrets.randbelow(10**6)))


@pytest.fixture
def server(demo_models: Path, tmp_path: Path) -> Iterator[Server]:
    server = start(tmp_path, storm_catalog(demo_models))
    yield server
    server.stop()


async def test_answers_are_those_of_an_undisturbed_server(server: Server, demo_models: Path) -> None:
    print(f"PRISM_STORM_SEED={SEED}")
    found = await storm(server, demo_models, SECONDS, SEED)
    print(f"killed {dict(found.killed)}, stopped {dict(found.stopped)}; requests: {dict(found.ends)}")
    assert not found.faults, "\n".join(found.faults)
    assert found.ends["answered"], "nothing was answered, so nothing was compared"
    assert found.killed and found.stopped
