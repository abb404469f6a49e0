"""Several machines for real: SGLang engines, mailboxes, weights and store over the network."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.wire.secret import make_secret
from tests.net.netns import Hosts, why_not
from tests.patience import PATIENCE_S, until

from .fleet import PRISM, Fleet, Host, on_hosts
from .server import DEMOS, REPO, catalog, greedy

LLAMA, QWEN, STABLELM = DEMOS
TOKENS = 400


pytestmark = [pytest.mark.engine, pytest.mark.net]


@pytest.fixture(scope="module")
def fleet(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The server on host 0 and the machine "b" on host 1, each with one device that holds two models; all on loopback
    where there are no namespaces."""
    folder = tmp_path_factory.mktemp("f")
    if why_not():
        yield from running(Fleet(folder, [Host()] * 3), demo_models)
        return
    with Hosts(3, 1000.0) as hosts:
        yield from running(Fleet(folder, on_hosts(hosts)), demo_models)


def running(fleet: Fleet, demo_models: Path) -> Iterator[Fleet]:
    try:
        fleet.begin_serving(catalog(demo_models, count=1))
        fleet.begin_joining("b", 1)
        fleet.ready("local", "b")
        yield fleet
        fleet.stop()
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


def test_a_wrong_secret_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    make_secret(tmp_path / "wrong")
    fleet.begin_joining("stranger", 2, secret=tmp_path / "wrong")
    assert fleet.processes.pop("stranger").wait(PATIENCE_S) == 1
    assert "refuses the connection" in fleet.output("stranger") and "secret" in fleet.output("stranger")


def test_a_wrong_secret_is_refused_with_the_right_password(fleet: Fleet, tmp_path: Path) -> None:
    make_secret(tmp_path / "wrong")
    password = next(
        line.split()[1] for line in (fleet.folder / "local" / "redis" / "password.conf").read_text().splitlines()
    )
    url = f"redis://:{password}@{fleet.hosts[0].ip}:{fleet.store_port}"
    command = [*PRISM, "node", "--redis-url", url, "--secret-file", str(tmp_path / "wrong"), "--device", "host:0=32MiB"]
    done = subprocess.run(
        [*fleet.hosts[2].prefix, *command, "--state-dir", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the secret is not that of the fleet" in done.stderr
    assert password not in done.stdout + done.stderr


def test_a_name_is_given_once(fleet: Fleet, tmp_path: Path) -> None:
    command = [*PRISM, "node", "--redis-url", f"redis://{fleet.hosts[0].ip}:{fleet.store_port}", "--name", "b"]
    options = ["--secret-file", str(fleet.secret_file), "--device", "host:0=32MiB", "--state-dir", str(tmp_path / "s")]
    done = subprocess.run(
        [*fleet.hosts[2].prefix, *command, *options],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1 and "choose another --name" in done.stderr


def test_another_machine_answers_token_exact(fleet: Fleet, demo_models: Path) -> None:
    fleet.prism("load", LLAMA, "--device", "b/host:0")
    assert fleet.ask(LLAMA, "hello there", 64) == greedy(str(demo_models / LLAMA), "hello there", 64)
    assert [r["devices"] for r in fleet.replicas(LLAMA)] == [["b/host:0"]]
    fleet.prism("unload", LLAMA)


def test_weights_come_from_the_other_machines_memory(fleet: Fleet, demo_models: Path) -> None:
    """b's store lacks the model: load --to 2 has it sent once, as its log says; b answers alone what local answered."""
    fleet.prism("load", QWEN, "--device", "local/host:0")
    store = fleet.folder / "b" / "store"
    before = set(store.rglob("*.pack"))
    until(lambda: "local" in held(fleet, QWEN), "the controller knowing who has it")
    told = fleet.prism("load", QWEN, "--to", "2")
    assert "2 of 2" in told.stdout
    log = fleet.folder / "b" / "logs" / "agent-b.jsonl"
    until(lambda: f"{QWEN} arrived" in (said := log.read_text()) and "from local" in said, "word of where it came from")
    until(lambda: set(store.rglob("*.pack")) - before, "its being kept on b's disk")
    fleet.prism("drain", "local/host:0")
    until(lambda: [r["devices"] for r in fleet.replicas(QWEN)] == [["b/host:0"]], "local being empty")
    assert fleet.ask(QWEN, "and now you", 64) == greedy(str(demo_models / QWEN), "and now you", 64)
    fleet.prism("drain", "local/host:0", "--off")
    fleet.prism("unload", QWEN)


def held(fleet: Fleet, model: str) -> dict[str, str]:
    """Machines that have the weights, and where."""
    found: dict[str, str] = fleet.shown(model)["held"]
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a folder from a process needs root")
def test_a_late_joiner_without_the_models_folder_serves_it(fleet: Fleet, demo_models: Path) -> None:
    """Neither its folder nor an engine image of the model is at c, and nobody has an image: the files come."""
    fleet.begin_joining("c", 2, hide=demo_models)
    fleet.ready("c")
    fleet.prism("load", STABLELM, "--device", "c/host:0")
    assert [r["devices"] for r in fleet.replicas(STABLELM)] == [["c/host:0"]]
    assert fleet.ask(STABLELM, "far away", 64) == greedy(str(demo_models / STABLELM), "far away", 64)
    fleet.prism("unload", STABLELM)


def test_kill_9_of_a_machine_in_mid_stream(fleet: Fleet, demo_models: Path) -> None:
    fleet.prism("load", LLAMA, "--device", "b/host:0")
    killed: list[int] = []

    def at(pieces: int) -> None:
        if pieces == 20:
            killed.append(pieces)
            fleet.kill("b")

    assert fleet.ask(LLAMA, "go on", TOKENS, at) == greedy(str(demo_models / LLAMA), "go on", TOKENS)
    assert killed
    assert fleet.ask(LLAMA, "once more", 4) == greedy(str(demo_models / LLAMA), "once more", 4)
    until(lambda: all(not r["devices"][0].startswith("b/") for r in fleet.replicas(LLAMA)), "b being forgotten")
    fleet.prism("unload", LLAMA)


def test_a_machine_leaves_in_mid_stream(fleet: Fleet, demo_models: Path) -> None:
    name = "c" if "c" in fleet.processes else "b"
    if name not in fleet.processes:
        fleet.begin_joining("b", 1)
        fleet.ready("b")
    fleet.prism("load", LLAMA, "--device", f"{name}/host:0")
    left: list[int] = []

    def at(pieces: int) -> None:
        if pieces == 20:
            left.append(pieces)
            fleet.leave(name)

    assert fleet.ask(LLAMA, "farewell", TOKENS, at) == greedy(str(demo_models / LLAMA), "farewell", TOKENS)
    assert left
    until(lambda: f"{name}/host:0" not in devices(fleet), f"{name} being forgotten")


def devices(fleet: Fleet) -> set[str]:
    return {d["id"] for d in json.loads(fleet.prism("top", "--once", "--json").stdout)["devices"]}
