"""A conversation goes on from its cache after its model was unloaded, and goes on after the agent died with that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import host_pool_directory
from prism.kv.settings import read_kv_settings

from .server import Server, catalog, greedy, start, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MODEL, TOKENS = "demo-llama", 16
SAID = " ".join(f"the request number {i} waits for a device" for i in range(24))


@pytest.fixture
def server(demo_models: Path, tmp_path: Path) -> Iterator[Server]:
    """One device; KV outlives its engines."""
    config = catalog(demo_models, count=1, memory="64MiB", context_length=1024)
    config["kv"] = {"keep": True, "host_memory_fraction": 0.01}
    server = start(tmp_path, config)
    yield server
    server.stop()


def ask(server: Server, models: Path, prompt: str) -> tuple[str, int]:
    """The answer, which is the reference's, and how many tokens of the prompt were not computed for it."""
    answer = server.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == greedy(str(models / MODEL), prompt, TOKENS)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details.cached_tokens or 0) if details is not None else 0


def test_a_conversation_goes_on_and_a_killed_agent_costs_its_cache_at_most(server: Server, demo_models: Path) -> None:
    accounts = StateDir(server.state).accounts
    pool = HostPool(host_pool_directory(accounts), read_kv_settings(accounts).host_bytes)
    first, hits = ask(server, demo_models, SAID)
    assert hits == 0
    server.admin(f"models/{MODEL}/unload", {})
    server.wait_unloaded(MODEL)
    assert pool.use().pieces > 0
    following = f"{SAID}{first} and then"
    second, hits = ask(server, demo_models, following)
    assert hits >= 128, "it was brought back"
    others = [f"{i} {SAID}" for i in range(3)]
    for other in others:
        ask(server, demo_models, other)
    agent = server.named("agent")
    server.admin(f"models/{MODEL}/unload", {})
    server.kill(agent)  # and its engines with it, as far as they have come with what they store
    until(lambda: server.named("agent") != agent, "the next agent")
    third, _ = ask(server, demo_models, f"{following}{second} and so on")
    assert third
    for other in others:
        ask(server, demo_models, other)
    until(lambda: (use := pool.use()).booked_bytes == use.file_bytes, "exact books")
