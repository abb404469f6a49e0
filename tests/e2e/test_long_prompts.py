"""A prompt that is larger than its device through a whole server: kill -9 of engine, agent and controller in the middle
of its answer changes no token and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import host_pool_directory
from prism.kv.settings import read_kv_settings
from tests.engine.wide import make_wide_model

from .server import Server, greedy, start, stream, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MODEL, TOKENS = "wide-llama", 40
SAID = " ".join(f"the request number {i} waits for a device" for i in range(80))
MEMORY_MIB, TOKEN_KIB = 26, 64
"""Of a device, and KV of a token."""


@pytest.fixture(params=["host", "lent"])
def server(request: pytest.FixtureRequest, demo_models: Path, tmp_path: Path) -> Iterator[tuple[Server, Path, str]]:
    """Two devices, neither of which has room for SAID, the folder of their one model and where its KV may be."""
    wide = make_wide_model(demo_models, tmp_path / MODEL)
    links = {"host": "1GB", "peer": "4GB"}
    config = {
        "devices": [{"id": f"host:{i}", "memory": f"{MEMORY_MIB}MiB", "links": links} for i in range(2)],
        "defaults": {"slo": {"ttft": "20s", "tpot": "1s"}, "engine_args": {"dtype": "float32"}},
        "models": [{"name": MODEL, "path": str(wide)}],
        "policy": {"min_residency": "500ms", "min_kv_tokens": 128},  # a whole device has no room for the usual ones
        "server": {"front_workers": 2},
        "kv": {"keep": True, "host_memory_fraction": 0.01, "lend": True, "long_prompts": request.param},
    }
    server = start(tmp_path / "run", config)
    yield server, wide, request.param
    server.stop()


def outside(server: Server) -> dict[str, int]:
    """Bytes of long prompts by place, as the server tells."""
    found = {"host": 0, "lent": 0}
    for replica in server.replicas(MODEL):
        for place in found:
            found[place] += replica.get(f"long_{place}_bytes") or 0
    return found


async def answer_while_dying(server: Server, name: str, place: str) -> str:
    """The answer to SAID; the process ``name`` is killed when a few of its tokens have come and its KV is outside."""
    begun = asyncio.Event()
    async with server.async_client() as client:
        task = asyncio.create_task(
            stream(client, MODEL, SAID, TOKENS, lambda count: begun.set() if count >= 3 else None)
        )
        done, _ = await asyncio.wait([task, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert task not in done, f"it ended too soon: {task.result()}"
        await asyncio.to_thread(until, lambda: outside(server)[place] > 0, "its KV outside of the device")
        victims = server.pids("prism: engine") if name == "engine" else [server.named(name)]
        assert victims
        for victim in victims:
            server.kill(victim)
        return await task


async def test_killed_in_the_middle_of_a_long_answer(server: tuple[Server, Path, str]) -> None:
    live, model, place = server
    expected = greedy(str(model), SAID, TOKENS)
    usage = (await asyncio.to_thread(live.client.completions.create, model=MODEL, prompt=SAID, max_tokens=1)).usage
    assert usage is not None and usage.prompt_tokens * TOKEN_KIB > MEMORY_MIB << 10, "larger than a whole device"
    for name in ("controller", "agent", "engine"):
        assert await answer_while_dying(live, name, place) == expected, name
    await asyncio.to_thread(all_is_back, live)


def all_is_back(server: Server) -> None:
    """No request is left, and every byte of devices and host memory is back."""
    names = ("front-0", "front-1", "agent", "controller", "valkey", "zygote")
    until(lambda: set(server.running()) == set(names), "all processes running")
    until(lambda: not server.admin("requests")["requests"] and server.queued() == 0, "no request being open")
    server.admin(f"models/{MODEL}/unload", {})
    devices = lambda: server.admin("devices")["devices"]  # noqa: E731
    until(lambda: all(d["free_bytes"] == d["capacity_bytes"] for d in devices()), "all memory coming back")
    accounts = StateDir(server.state).accounts
    pool = HostPool(host_pool_directory(accounts), read_kv_settings(accounts).host_bytes)
    until(lambda: pool.claims() == {}, "what was claimed to be given back")
    use = pool.use()
    assert use.booked_bytes == use.file_bytes
