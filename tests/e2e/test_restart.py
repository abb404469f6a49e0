"""Stopping and starting again: nothing left behind, queues found, two servers never share a state directory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from prism.weights.store.shared_memory import default_host_directory
from tests.patience import PATIENCE_S, free_port

from .server import DEMOS, REPO, Server, catalog, complete, greedy, start, until

pytestmark = pytest.mark.engine


def test_stop_leaves_nothing_and_a_restart_serves_from_the_store(demo_models: Path, tmp_path: Path) -> None:
    first = start(tmp_path, catalog(demo_models))
    prompt, path = "once more", str(demo_models / DEMOS[0])
    assert complete(first.client, DEMOS[0], prompt, 12) == greedy(path, prompt, 12)
    second = [sys.executable, "-m", "prism.cli.main", "serve", str(tmp_path / "catalog.yaml")]
    second += ["--state-dir", str(first.state), "--port", str(free_port())]
    refused = subprocess.run(second, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode != 0 and "state directory" in refused.stderr + refused.stdout
    copies = default_host_directory(first.state / "store")
    assert copies.is_dir()
    first.stop()
    assert not copies.exists(), "host memory goes back to the machine"
    again = start(tmp_path, catalog(demo_models), state=first.state)
    assert complete(again.client, DEMOS[0], prompt, 12) == greedy(path, prompt, 12)
    again.stop()


def test_a_dead_supervisor_takes_everything_along(demo_models: Path, tmp_path: Path) -> None:
    server = start(tmp_path, catalog(demo_models))
    complete(server.client, DEMOS[0], "warm", 2)
    family = server.family()
    server.kill(server.process.pid)
    server.process.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


def test_editing_the_catalog_adds_and_removes_models_without_a_restart(demo_models: Path, tmp_path: Path) -> None:
    config = catalog(demo_models)
    server = start(tmp_path, config)
    complete(server.client, DEMOS[0], "warm", 2)
    extra = {"name": "extra", "path": str(demo_models / DEMOS[2]), "aliases": ["more"]}
    changed = {**config, "models": [*config["models"][1:], extra]}
    (tmp_path / "catalog.yaml").write_text(json.dumps(changed))
    server.admin("reload", {})
    assert complete(server.client, "more", "new", 8) == greedy(str(demo_models / DEMOS[2]), "new", 8)
    until(lambda: listed(server) == {*DEMOS[1:], "extra"}, "the change in every worker")
    (tmp_path / "catalog.yaml").write_text(json.dumps(config))
    server.process.send_signal(signal.SIGHUP)
    until(lambda: listed(server) == set(DEMOS), "the old catalog again")
    assert complete(server.client, DEMOS[0], "back", 8) == greedy(str(demo_models / DEMOS[0]), "back", 8)
    server.stop()


def listed(server: Server) -> set[str]:
    """The models that all of several fresh connections are told of: they may lead to different workers."""
    answers = [httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"] for _ in range(8)]
    return set.union(*({m["id"] for m in answer} for answer in answers))
