"""Stopping and starting again: nothing left behind, queues found, two servers never share a state directory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from prism.weights.store.shared_memory import default_host_directory
from tests.patience import PATIENCE_S, free_port

from .server import DEMOS, HTTP, REPO, Server, catalog, complete, greedy, start, until

pytestmark = pytest.mark.engine


def test_a_life_of_a_server(demo_models: Path, tmp_path: Path) -> None:
    """One server and the one that follows it: each start costs SGLang's import."""
    config = catalog(demo_models)
    first = start(tmp_path, config)
    prompt, path = "once more", str(demo_models / DEMOS[0])
    assert complete(first.client, DEMOS[0], prompt, 12) == greedy(path, prompt, 12)
    models_come_and_go_without_a_restart(first, tmp_path / "catalog.yaml", config, demo_models)
    a_second_one_is_refused(first, tmp_path / "catalog.yaml")
    copies = default_host_directory(first.state / "store")
    assert copies.is_dir()
    first.stop()  # nothing is left behind
    assert not copies.exists(), "host memory goes back to the machine"
    again = start(tmp_path, config, state=first.state)
    assert complete(again.client, DEMOS[0], prompt, 12) == greedy(path, prompt, 12), "from the store"
    a_dead_supervisor_takes_everything_along(again)


def models_come_and_go_without_a_restart(server: Server, file: Path, config: dict[str, Any], models: Path) -> None:
    extra = {"name": "extra", "path": str(models / DEMOS[2]), "aliases": ["more"]}
    changed = {**config, "models": [*config["models"][1:], extra]}
    file.write_text(json.dumps(changed))
    server.admin("reload", {})
    assert complete(server.client, "more", "new", 8) == greedy(str(models / DEMOS[2]), "new", 8)
    until(lambda: listed(server) == {*DEMOS[1:], "extra"}, "the change in every worker")
    file.write_text(json.dumps(config))
    server.process.send_signal(signal.SIGHUP)
    until(lambda: listed(server) == set(DEMOS), "the old catalog again")
    assert complete(server.client, DEMOS[0], "back", 8) == greedy(str(models / DEMOS[0]), "back", 8)


def a_second_one_is_refused(server: Server, file: Path) -> None:
    command = [sys.executable, "-m", "prism.cli.main", "serve", str(file), "--state-dir", str(server.state)]
    command += ["--port", str(free_port())]
    refused = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode != 0 and "state directory" in refused.stderr + refused.stdout


def a_dead_supervisor_takes_everything_along(server: Server) -> None:
    family = server.family()
    server.kill(server.process.pid)
    server.process.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive
    server.client.close()


def listed(server: Server) -> set[str]:
    """The models that all of several fresh connections are told of: they may lead to different workers."""
    answers = [HTTP.get(f"{server.url}/v1/models").json()["data"] for _ in range(8)]
    return set.union(*({m["id"] for m in answer} for answer in answers))
