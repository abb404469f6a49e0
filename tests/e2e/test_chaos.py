"""kill -9 at random moments, many times, under load: every answer is right to the last token, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from .server import DEMOS, Server, catalog, greedy, prompts, start, stream
from .wellbeing import all_is_well_again

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 120
CLIENTS = 6
SECONDS = float(os.environ.get("PRISM_CHAOS_S", "120"))
SEED = int(os.environ.get("PRISM_CHAOS_SEED", secrets.randbelow(10**6)))
VICTIMS = ("engine", "engine", "agent", "controller", "valkey", "front", "front", "zygote")
REST_S = {"zygote": 30.0, "front": 8.0}
"""So long a kind is left alone after its death: a zygote imports SGLang anew, and one front door must be there."""
ASKS = [(DEMOS[i % 3], prompt) for i, prompt in enumerate(prompts(12))]


@pytest.fixture
def server(demo_models: Path, tmp_path: Path) -> Iterator[Server]:
    server = start(tmp_path, catalog(demo_models))
    yield server
    server.stop()


@dataclass
class Chaos:
    """One run: what was killed when, and how the requests ended."""

    server: Server
    chance: random.Random
    over: bool = False
    killed: Counter[str] = field(default_factory=Counter)
    last_s: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def enough(self) -> bool:
        """Whether every kind died and requests were answered between; a slow machine needs longer for that."""
        return self.ends["answered"] > len(ASKS) and set(self.killed) == set(VICTIMS)

    async def kill(self) -> None:
        """All kinds in turn, in an order and at moments drawn by chance."""
        until_s = time.monotonic() + SECONDS
        round_: list[str] = []
        while time.monotonic() < until_s or not self.enough:
            await asyncio.sleep(self.chance.uniform(0.1, 3.0))
            round_ = round_ or self.chance.sample(VICTIMS, len(VICTIMS))
            kind = round_.pop()
            if time.monotonic() - self.last_s.get(kind, 0.0) < REST_S.get(kind, 0.0):
                continue
            victim = await asyncio.to_thread(self.server.victim, kind, self.chance)
            if victim is not None:
                self.last_s[kind] = time.monotonic()
                self.killed[kind] += 1
                self.server.kill(victim)
        self.over = True

    async def ask(self, client: openai.AsyncOpenAI, expected: dict[tuple[str, str], str]) -> None:
        """Requests one after the other until it is over."""
        while not self.over:
            model, prompt = self.chance.choice(ASKS)
            began_s = time.monotonic()
            try:
                answer = await stream(client, model, prompt, TOKENS)
            except (openai.APIConnectionError, httpx.TransportError) as error:
                self._broken(error, began_s)
            except openai.APIError as error:
                self._refused(error)
                await asyncio.sleep(0.5)
            else:
                self.ends["answered"] += 1
                if answer != expected[model, prompt]:
                    self.wrong.append(f"{model} {prompt!r}: {answer!r} is not {expected[model, prompt]!r}")

    def _broken(self, error: Exception, began_s: float) -> None:
        """Only a front door's own death may break a connection."""
        self.ends["broken"] += 1
        if self.last_s.get("front", 0.0) < began_s - REST_S["front"]:
            self.wrong.append(f"a connection broke by itself after {time.monotonic() - began_s:.1f} s: {error!r}")

    def _refused(self, error: openai.APIError) -> None:
        """A clear error: it has a code, and nothing was said that was not so."""
        self.ends[f"refused: {error.code}"] += 1
        if not error.code or error.code == "internal_error":
            self.wrong.append(f"an unclear error: {error!r}")


async def test_killed_at_random_moments_again_and_again(server: Server, demo_models: Path) -> None:
    print(f"PRISM_CHAOS_SEED={SEED}")
    expected = {(model, prompt): greedy(str(demo_models / model), prompt, TOKENS) for model, prompt in ASKS}
    chaos = Chaos(server, random.Random(SEED))
    async with server.async_client() as client, asyncio.TaskGroup() as group:
        group.create_task(chaos.kill())
        for _ in range(CLIENTS):
            group.create_task(chaos.ask(client, expected))
    print(f"killed: {dict(chaos.killed)}; requests: {dict(chaos.ends)}")
    assert not chaos.wrong, "\n".join(chaos.wrong)
    assert chaos.enough
    await asyncio.to_thread(all_is_well_again, server, demo_models)
