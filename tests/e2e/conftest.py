"""Fixtures of the end-to-end tests: one server for all tests that need nothing special."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import DEMOS, Server, catalog, start


@pytest.fixture(scope="session")
def server(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo models on two devices that hold little more than two of them each, one model over both devices, and
    one that embeds."""
    config = catalog(demo_models)
    config["models"].append({"name": "demo-tp2", "path": str(demo_models / DEMOS[0]), "tp": 2})
    config["models"].append({"name": "demo-vectors", "path": str(demo_models / DEMOS[1]), "kind": "embed"})
    server = start(tmp_path_factory.mktemp("s"), config, from_warm=False)
    yield server
    server.stop()


BRIEF, KEEP_S = "demo-brief", 2.0
"""A model that leaves when it has been idle for so long."""


@pytest.fixture(scope="package")
def peculiar(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo models, one that leaves soon, and some that are corrupt, incomplete, or too large for any device."""
    folder = tmp_path_factory.mktemp("f")
    corrupt, missing, large = folder / "corrupt", folder / "missing", folder / "large"
    for broken in (corrupt, missing, large):
        shutil.copytree(demo_models / DEMOS[0], broken)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    (missing / "model.safetensors").unlink()
    config = catalog(demo_models)
    config["models"] += [{"name": f.name, "path": str(f)} for f in (corrupt, missing)]
    config["models"].append({"name": "large", "path": str(large), "min_kv_memory": "1GiB"})
    config["models"].append({"name": "nowhere", "path": str(folder / "nowhere")})
    config["models"].append({"name": BRIEF, "path": str(demo_models / DEMOS[0]), "keep_alive": f"{KEEP_S:g}s"})
    server = start(folder / "run", config, from_warm=False)
    yield server
    server.stop()
