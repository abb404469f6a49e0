"""The main path on real engines: right answers, cold, warm, evicted, shared, streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .server import DEMOS, Server, complete, greedy, prompts, scores, stream, until

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", DEMOS)
def test_cold_then_warm_equals_the_reference(server: Server, demo_models: Path, model: str) -> None:
    prompt, path = prompts(1)[0], str(demo_models / model)
    for _ in ("cold", "warm"):
        assert complete(server.client, model, prompt, 24) == greedy(path, prompt, 24)


@pytest.mark.parametrize("model", DEMOS)
def test_a_prompt_that_is_only_scored_has_the_references_log_probabilities(
    server: Server, demo_models: Path, model: str
) -> None:
    """Twice: what the first one left in the cache answers nothing."""
    for _ in range(2):
        answer = server.client.completions.create(
            model=model, prompt=prompts(9)[8], max_tokens=0, echo=True, logprobs=1, temperature=0
        )
        [choice], usage = answer.choices, answer.usage
        assert choice.text == prompts(9)[8] and choice.finish_reason == "length" and choice.logprobs is not None
        told = choice.logprobs.token_logprobs or []
        expected = scores(str(demo_models / model), prompts(9)[8])
        assert told[0] is None and told[1:] == pytest.approx(expected, abs=1e-3)
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len(told), 0)


async def test_many_at_once_with_shared_prefixes_equal_the_reference(server: Server, demo_models: Path) -> None:
    asks = [(DEMOS[i % 3], prompt) for i, prompt in enumerate(prompts(24))]
    async with server.async_client() as client:
        answers = await asyncio.gather(*(stream(client, model, prompt, 20) for model, prompt in asks))
    for (model, prompt), answer in zip(asks, answers, strict=True):
        assert answer == greedy(str(demo_models / model), prompt, 20)


@pytest.mark.parametrize("model", DEMOS)
def test_after_unloading_it_comes_back_the_same(server: Server, demo_models: Path, model: str) -> None:
    prompt = prompts(2)[1]
    complete(server.client, model, prompt, 4)
    server.admin(f"models/{model}/unload", {})
    server.wait_unloaded(model)
    assert complete(server.client, model, prompt, 24) == greedy(str(demo_models / model), prompt, 24)


def test_on_another_device_it_answers_the_same(server: Server, demo_models: Path) -> None:
    model, prompt = DEMOS[0], prompts(3)[2]
    for device in ("local/host:0", "local/host:1"):
        server.admin(f"models/{model}/unload", {})
        server.wait_unloaded(model)
        server.admin(f"models/{model}/load", {"devices": [device]})
        until(lambda: [r["devices"] for r in server.replicas(model)] == [[device]], f"being on {device}")  # noqa: B023
        assert complete(server.client, model, prompt, 16) == greedy(str(demo_models / model), prompt, 16)


def test_tensor_parallel_over_both_devices_equals_the_reference(server: Server, demo_models: Path) -> None:
    prompt, path = prompts(5)[4], str(demo_models / DEMOS[0])
    assert complete(server.client, "demo-tp2", prompt, 16) == greedy(path, prompt, 16)
    [replica] = until(lambda: server.replicas("demo-tp2"), "its being shown")
    assert len(replica["devices"]) == 2
    server.admin("models/demo-tp2/unload", {})
    server.wait_unloaded("demo-tp2")


async def test_unloading_in_mid_answer_carries_the_request_over(server: Server, demo_models: Path) -> None:
    model, prompt, tokens = DEMOS[1], prompts(4)[3], 200
    begun = asyncio.Event()
    async with server.async_client() as client:
        asking = asyncio.create_task(
            stream(client, model, prompt, tokens, lambda count: begun.set() if count > 5 else None)
        )
        await begun.wait()
        await asyncio.to_thread(server.admin, f"models/{model}/unload", {"carry": True})
        assert await asking == greedy(str(demo_models / model), prompt, tokens)


async def test_moved_in_mid_answer_to_another_device_it_goes_on_exactly(server: Server, demo_models: Path) -> None:
    model, prompt, tokens = DEMOS[2], prompts(6)[5], 200
    begun = asyncio.Event()
    await asyncio.to_thread(complete, server.client, model, prompt, 2)
    [replica] = await asyncio.to_thread(until, lambda: server.replicas(model), "being on a device")
    async with server.async_client() as client:
        asking = asyncio.create_task(
            stream(client, model, prompt, tokens, lambda count: begun.set() if count > 5 else None)
        )
        await begun.wait()
        await asyncio.to_thread(server.admin, "drain", {"devices": replica["devices"], "carry": True})
        assert await asking == greedy(str(demo_models / model), prompt, tokens)
    await asyncio.to_thread(complete, server.client, model, prompt, 2)  # brings it up if the answer was done before
    elsewhere = lambda: [r["devices"] for r in server.replicas(model)] not in ([], [replica["devices"]])  # noqa: E731
    await asyncio.to_thread(until, elsewhere, "being on the other device")
    await asyncio.to_thread(server.admin, "undrain", {"devices": replica["devices"]})


def test_when_nothing_runs_the_accounts_are_exact(server: Server) -> None:
    """Unload everything: every byte of every device is free again."""
    for model in DEMOS:
        server.admin(f"models/{model}/unload", {})
        server.wait_unloaded(model)

    def all_free() -> bool:
        return all(d["free_bytes"] == d["capacity_bytes"] for d in server.admin("devices")["devices"])

    until(all_free, "all memory coming back")
