"""Fixtures of the end-to-end tests: the demo models and one server for all tests that need nothing special."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import DEMOS, REPO, Server, catalog, start


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo models of `make serve` if they are there, else made now."""
    if (REPO / "demo-models" / ".complete").exists():
        return REPO / "demo-models"
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, "scripts/make_demo_models.py", str(folder)], cwd=REPO, check=True)
    return folder


@pytest.fixture(scope="session")
def server(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo models on two devices that hold little more than two of them each, one model over both devices, and
    one that embeds."""
    config = catalog(demo_models)
    config["models"].append({"name": "demo-tp2", "path": str(demo_models / DEMOS[0]), "tp": 2})
    config["models"].append({"name": "demo-vectors", "path": str(demo_models / DEMOS[1]), "kind": "embed"})
    server = start(tmp_path_factory.mktemp("s"), config)
    yield server
    server.stop()
