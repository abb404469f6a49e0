"""The operator's verbs and metrics on a real server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from prism.cli.errors import Exit
from prism.cli.main import main
from prism.obs.names import METRICS

from .server import DEMOS, HTTP, Server, catalog, complete, start, until

pytestmark = pytest.mark.engine
LLAMA, QWEN, STABLELM = DEMOS


@pytest.fixture(scope="module")
def server(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of their own: these tests look at everything that it has done."""
    server = start(tmp_path_factory.mktemp("o"), catalog(demo_models))
    yield server
    server.stop()


def prism(server: Server, *arguments: str, code: int = 0) -> str:
    """What ``prism ARGUMENTS`` prints."""
    where = {"PRISM_URL": server.url, "PRISM_STATE_DIR": str(server.state)}
    done = CliRunner().invoke(main, list(arguments), env=where)
    assert done.exit_code == code, done.output
    return done.output


def as_json(server: Server, *arguments: str) -> Any:
    return json.loads(prism(server, *arguments, "--json"))


def test_a_model_from_cold_to_loaded_to_gone(server: Server) -> None:
    assert {model["name"]: model["state"] for model in as_json(server, "ls")}[LLAMA] == "inactive"
    assert "is ready after" in prism(server, "load", LLAMA)
    assert "was ready already" in prism(server, "load", LLAMA)
    until(lambda: [m["state"] for m in as_json(server, "ps") if m["name"] == LLAMA] == ["ready"], "its being shown")
    complete(server.client, LLAMA, "hello", 4)

    def reported() -> Any:
        model = next(m for m in as_json(server, "ls") if m["name"] == LLAMA)
        numbers = [r["weight_bytes"] and r["kv_bytes"] for r in model["replicas"]]
        return model if numbers and all(numbers) and model["ttft_attainment"] is not None else None

    model = until(reported, "the model's numbers")
    assert model["replicas"][0]["devices"][0].startswith("local/host:")
    assert "host:0  32.0 MiB" in prism(server, "mem"), "the accounts of this server's devices"
    shown = prism(server, "show", LLAMA)
    assert "Activate" in shown and "operator" in shown
    assert as_json(server, "show", LLAMA)["config"]["slo"]["ttft"] == "2s"
    assert "has left" in prism(server, "unload", LLAMA)
    server.wait_unloaded(LLAMA)


def test_pinned_models_are_loaded_and_said_to_be(server: Server) -> None:
    prism(server, "pin", STABLELM)
    until(lambda: server.replicas(STABLELM), "the pinned model")
    until(lambda: f"{STABLELM} (pinned)" in prism(server, "ls"), "the pin being shown")
    prism(server, "pin", STABLELM, "--off")
    until(lambda: f"{STABLELM} (pinned)" not in prism(server, "ls"), "the pin being gone")


def test_plan_gives_reasons(server: Server) -> None:
    prism(server, "load", QWEN)
    plan = until(lambda: as_json(server, "plan")["decisions"], "a plan")
    assert all(decision["reason"]["code"] for decision in plan)


def test_another_policy_is_tried_on_the_servers_state(server: Server, demo_models: Path, tmp_path: Path) -> None:
    prism(server, "load", QWEN)
    file, state = tmp_path / "catalog.yaml", tmp_path / "snapshot.json"
    file.write_text(json.dumps(catalog(demo_models)))

    def taken() -> bool:
        state.write_text(prism(server, "plan", "--snapshot"))
        return any(model["name"] == QWEN and model["instances"] for model in json.loads(state.read_text())["models"])

    until(taken, "the model in the controller's view")
    for policy in ("prism", "qlm"):
        found = as_json(server, "sim", "--dry-run", str(state), "--catalog", str(file), "--policy", policy)
        assert found["policy"] == policy and not found["notes"]
        assert QWEN not in {action["model"] for action in found["actions"] if action["action"] == "activate"}


def test_draining_empties_a_device(server: Server) -> None:
    prism(server, "load", QWEN)
    [replica] = until(lambda: server.replicas(QWEN), "the model's device")
    [device] = replica["devices"]
    prism(server, "drain", device)
    until(lambda: not any(device in replica["devices"] for replica in server.replicas(QWEN)), "the drain")
    until(lambda: f"{device} (draining)" in prism(server, "top", "--once"), "the drain being shown")
    complete(server.client, QWEN, "hello", 4)
    [replica] = until(lambda: server.replicas(QWEN), "the model elsewhere")
    assert device not in replica["devices"]
    prism(server, "drain", device, "--off")


async def test_a_request_is_listed_and_cancelled(server: Server) -> None:
    async with server.async_client() as client:
        stream = await client.completions.create(
            model=LLAMA, prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )

        def listed() -> Any:  # the list is up to a second old and may still have another test's request
            return next((r for r in as_json(server, "requests") if r["model"] == LLAMA), None)

        request = await asyncio.to_thread(until, listed, "the request being listed")
        await asyncio.to_thread(prism, server, "cancel", request["id"])
        with pytest.raises(Exception, match=r"(?i)cancel"):
            async for _ in stream:
                pass
    await asyncio.to_thread(until, lambda: not as_json(server, "requests"), "the request being gone")


def test_logs_follow_a_request(server: Server) -> None:
    complete(server.client, LLAMA, "hello", 4)
    assert "listening" in prism(server, "logs", "--process", "front")
    decisions = [json.loads(line) for line in prism(server, "logs", "--decisions", "--json").splitlines()]
    assert any(line["do"] == "Activate" and line["model"] == LLAMA for line in decisions)
    assert prism(server, "logs", "--raw", "-n", "1")


def test_a_reload_after_the_server_was_first_says_what_was_taken_over(server: Server) -> None:
    file = server.state.parent / "catalog.yaml"
    config = json.loads(file.read_text())
    config["models"].append({"name": "extra", "path": config["models"][0]["path"]})
    config["models"].append({"name": "gone", "path": "/nowhere"})
    file.write_text(json.dumps(config))
    until(lambda: "extra" in prism(server, "ls"), "the server looking at the file by itself")
    assert "+extra" in prism(server, "reload")
    until(lambda: "gone" in prism(server, "ls", "--state", "failed"), "the model without files being known")
    for verb in (["ls"], ["ps"], ["show", "gone"]):
        assert "does not exist" in prism(server, *verb), "before its first request"


def test_what_cannot_be_done_says_why(server: Server) -> None:
    assert "demo-llama" in prism(server, "load", "demo-lama", code=Exit.FAILED)
    assert "key" in prism(server, "ps", "--key", "wrong", code=Exit.UNAUTHORIZED)
    assert "nope" in prism(server, "cancel", "nope", code=Exit.FAILED)


def test_metrics_have_the_documented_names(server: Server) -> None:
    complete(server.client, LLAMA, "hello", 4)

    def scrape() -> str:
        return HTTP.get(f"{server.url}/metrics").text

    until(lambda: re.search(r'prism_device_mapped_bytes{[^}]*use="weights"} [1-9]', scrape()), "mapped bytes")
    text = scrape()
    shown = set(re.findall(r"^# TYPE (prism_\w+)", text, re.MULTILINE))
    assert shown <= {metric.name for metric in METRICS}
    for name in ("prism_requests_total", "prism_ttft_seconds", "prism_activations_total", "prism_decisions_total"):
        assert name in shown


def test_the_admin_key_stands_in_no_process_and_no_file_that_others_read(server: Server) -> None:
    prism(server, "ps")
    key = (server.state / "admin.key").read_text().strip()
    for process in server.family():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            assert key not in " ".join(process.cmdline()), process
            assert key not in process.environ().values(), process

    def holds(file: Path) -> bool:
        with suppress(FileNotFoundError):  # written under another name, and renamed meanwhile
            return file.is_file() and key.encode() in file.read_bytes()
        return False

    holders = [file for file in server.state.rglob("*") if holds(file)]
    assert server.state / "admin.key" in holders
    assert [file for file in holders if file.stat().st_mode & 0o077] == []
