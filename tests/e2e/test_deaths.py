"""kill -9 of every process in mid-stream: streams go on with the right tokens, others are not disturbed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from .server import DEMOS, Server, complete, greedy, prompts, stream, until

pytestmark = pytest.mark.engine

TOKENS = 160


async def streams_survive(server: Server, demo_models: Path, victims: list[int], seed: int = 0) -> None:
    """Streams over all models; the victims die at a random moment; every stream must be right to the last token."""
    chance = random.Random(seed)
    asks = [(DEMOS[i % 3], prompt) for i, prompt in enumerate(prompts(6))]
    begun = [asyncio.Event() for _ in asks]

    def note(i: int, at: int) -> object:
        return lambda count: begun[i].set() if count >= at else None

    async with server.async_client() as client:
        tasks = [
            asyncio.create_task(stream(client, model, prompt, TOKENS, note(i, chance.randrange(1, 30))))  # type: ignore[arg-type]
            for i, (model, prompt) in enumerate(asks)
        ]
        await begun[chance.randrange(len(asks))].wait()
        for victim in victims:
            server.kill(victim)
        answers = await asyncio.gather(*tasks)
    for (model, prompt), answer in zip(asks, answers, strict=True):
        assert answer == greedy(str(demo_models / model), prompt, TOKENS)


@pytest.mark.parametrize("name", ["engine", "agent", "controller", "valkey", "zygote"])
async def test_killed_in_mid_stream(server: Server, demo_models: Path, name: str) -> None:
    await asyncio.to_thread(warm, server)
    victims = server.pids("prism: engine")[:1] if name == "engine" else [server.named(name)]
    assert victims
    await streams_survive(server, demo_models, victims)


async def test_after_zygote_and_agent_were_killed_the_standby_takes_over(server: Server, demo_models: Path) -> None:
    """Nobody waits for SGLang's import, which takes a busy machine minutes."""
    await asyncio.to_thread(warm, server)
    [standby] = await asyncio.to_thread(until, lambda: server.pids("prism: standby"), "a standby")
    await streams_survive(server, demo_models, [server.named("zygote"), server.named("agent")])
    assert await asyncio.to_thread(server.named, "zygote") == standby
    again = await asyncio.to_thread(until, lambda: server.pids("prism: standby"), "the next standby")
    assert again != [standby]


def test_a_new_controller_starts_nothing_beside_what_serves(server: Server) -> None:
    """Orders that come at once wait until it has heard what serves."""
    warm(server)
    until(lambda: any(server.replicas(model) for model in DEMOS), "what serves being shown")
    there = [model for model in DEMOS if server.replicas(model)]  # not all of them have room
    before = {model: places(server, model) for model in there}
    for _ in range(2):
        server.kill(server.named("controller"))
        for model in there:
            assert server.admin(f"models/{model}/load", {})["detail"].get("was_ready")
        assert {model: places(server, model) for model in there} == before


def places(server: Server, model: str) -> list[tuple[list[str], int]]:
    return [(replica["devices"], replica["generation"]) for replica in server.replicas(model)]


async def test_one_of_two_front_doors_dies_and_the_other_goes_on(server: Server, demo_models: Path) -> None:
    """Streams through the dead worker break (its sockets are gone); all others are right, and new ones are served."""
    await asyncio.to_thread(warm, server)
    begun, victim = asyncio.Event(), await asyncio.to_thread(server.named, "front-0")
    asks = [(DEMOS[i % 3], prompt) for i, prompt in enumerate(prompts(18))]
    async with server.async_client() as client:
        tasks = [
            asyncio.create_task(stream(client, m, p, TOKENS, lambda count: begun.set() if count > 3 else None))
            for m, p in asks
        ]
        await begun.wait()
        server.kill(victim)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    whole = 0
    for (model, prompt), answer in zip(asks, answers, strict=True):
        if isinstance(answer, str):
            assert answer == greedy(str(demo_models / model), prompt, TOKENS)
            whole += 1
    assert 0 < whole < len(asks), "connections spread over both workers"
    await asyncio.to_thread(until, lambda: server.queued() == 0, "the dead worker's requests being dropped")
    again = server.client.with_options(max_retries=3)  # a kept connection may lead to the dead worker
    assert complete(again, DEMOS[0], "again", 8) == greedy(str(demo_models / DEMOS[0]), "again", 8)


def warm(server: Server) -> None:
    for model in DEMOS:
        complete(server.client, model, "warm", 2)
