"""The control plane end to end on fake engines: cold start, sharing, eviction, deaths in mid-answer."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from prism.core.ids import ModelName
from prism.engine.fake import FakePool
from prism.node import agent

from .fake_system import MIB, SPEED, System, ended, fake_system, model, some_tokens, start_agent, whole


async def test_a_cold_model_wakes_and_answers(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a")]) as system:
        answer = await system.front.ask("a")
        await ended(answer)
        assert whole(answer)
        await system.empty()


async def test_more_models_than_fit_take_turns_and_nobody_is_lost(tmp_path: Path) -> None:
    specs = [model(f"m{i}", 60 * MIB) for i in range(6)]  # two fit
    async with fake_system(tmp_path, specs) as system:
        answers = [await system.front.ask(f"m{i % 6}", 5) for i in range(60)]
        await ended(*answers)
        assert all(whole(a) for a in answers)
        await system.empty()


async def test_an_engine_that_dies_in_mid_answer_costs_no_token(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a")]) as system:
        answers = [await system.front.ask("a", 100) for _ in range(8)]
        await some_tokens(answers)
        system.engines("a")[0].kill()
        await ended(*answers)
        assert all(whole(a) for a in answers)
        await system.empty()


async def test_a_request_that_kills_every_engine_ends_and_its_neighbours_go_on(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a")]) as system:
        neighbours = [await system.front.ask("a", 200) for _ in range(4)]
        poison = await system.front.ask("a", 201)
        deaths = 0
        while not poison.ended.is_set():
            for engine in system.engines("a"):
                if engine.alive and any(run.total == 201 and run.sent for run in engine._runs.values()):
                    engine.kill("the answer to everything", by_itself=True)
                    deaths += 1
            await asyncio.sleep(0.001)
        assert poison.failed is not None and poison.failed.code == "poison_request"
        assert poison.failed.retry_after_s is None and "the answer to everything" in poison.failed.message
        await ended(*neighbours)
        assert all(whole(a) for a in neighbours)
        assert deaths == 2
        await system.empty()


async def test_an_entry_whose_engines_die_of_every_request_is_refused_after_three(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a")]) as system:
        answers, deaths = [await system.front.ask("a", 20) for _ in range(4)], 0
        while not all(a.ended.is_set() for a in answers):
            for engine in system.engines("a"):
                if engine.alive and engine._runs:
                    engine.kill("no logits", by_itself=True)
                    deaths += 1
            await asyncio.sleep(0)
        codes = {a.failed.code for a in answers if a.failed is not None}
        assert codes <= {"poison_request", "activation_failed"} and len(codes) == 2
        assert all(a.failed.retry_after_s is None and "no logits" in a.failed.message for a in answers if a.failed)
        assert deaths == 3


async def test_an_engine_that_dies_before_any_report_shows_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SETTLE_S", 0.5)
    async with fake_system(tmp_path, [model("a")]) as system:
        answer = await system.front.ask("a", 100)
        while not system.controller.placement.route_of(ModelName("a")):
            await asyncio.sleep(0)
        system.engines("a")[0].kill()
        await ended(answer)
        assert whole(answer)
        await system.empty()


async def test_an_agent_that_dies_is_replaced_and_its_requests_go_on(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a"), model("b")]) as system:
        answers = [await system.front.ask("ab"[i % 2], 100) for i in range(8)]
        await some_tokens(answers)
        await replace_agent(system, tmp_path)
        await ended(*answers)
        assert all(whole(a) for a in answers)
        await system.empty()


async def test_random_deaths_under_load_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    specs = [model(f"m{i}", 45 * MIB) for i in range(5)]  # two per device
    async with fake_system(tmp_path, specs) as system:
        answers = []
        for _ in range(40):
            answers += [await system.front.ask(f"m{chance.randrange(5)}", chance.randrange(1, 60)) for _ in range(3)]
            await asyncio.sleep(0.02)
            living = [h for p in system.pools for h in p.handles if h.alive]
            if living and chance.random() < 0.3:
                chance.choice(living).kill()
            if chance.random() < 0.05:
                await replace_agent(system, tmp_path)
        await ended(*answers)
        broken = [(a.failed, a.attempt, a.wanted, len(a.tokens), a.finish) for a in answers if not whole(a)]
        assert not broken
        await system.empty()


async def replace_agent(system: System, folder: Path) -> None:
    """kill -9 of the agent with its engines, and the supervisor's restart."""
    old = system.agents[-1]
    for handle in system.pools[-1].handles:
        handle.kill()
    system.tasks["agent"].cancel()
    await asyncio.gather(system.tasks["agent"], return_exceptions=True)
    old.inbox.close()
    pool = FakePool(SPEED)
    new = start_agent(system.store, folder, pool, "agent", len(system.agents))
    system.pools.append(pool)
    system.agents.append(new)
    system.tasks["agent"] = asyncio.create_task(new.run())
