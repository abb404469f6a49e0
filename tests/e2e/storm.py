"""A kill storm over a real server: processes are killed and stopped at random while clients use everything the API has.

    python -m tests.e2e.storm [--seconds 60] [--seed N]        (make storm STORM="--seconds 600 --seed 7")

Every answer that ends is compared with what an undisturbed server said to the same request; every broken connection
must be explained by the death of its front door, every error must have a code. Afterwards the server must serve and
hold no request, byte or process too many. Answers are deterministic (greedy, or seeded), so that one that differs is a
fault - or the model was undecided there: then :mod:`tests.e2e.ties` says by how little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from .asks import ASKS, Answer, Ask, send
from .server import REPO, Server, catalog, start
from .ties import undecided
from .wellbeing import all_is_well_again

KINDS = ("engine", "engine", "agent", "controller", "valkey", "front", "front", "zygote", "standby")
STOPPED = ("engine", "agent", "controller", "front", "zygote")
"""Kinds that are also stopped (SIGSTOP) for a while; a stopped store is the same as a slow one."""
REST_S = {"zygote": 5.0, "front": 8.0}
"""So long a kind is left alone after its death: one front door must be there."""
STOP_MOST_S = 3.0
CLIENTS = 6


@dataclass
class Storm:
    """One run: what was done to whom, and how requests ended."""

    server: Server
    chance: random.Random
    seconds: float
    expected: dict[str, Answer]
    over: bool = False
    killed: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    last_s: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    differing: list[tuple[Ask, Answer]] = field(default_factory=list)

    async def rage(self) -> None:
        """Kills and stops, in an order and at moments drawn by chance, until the time is over."""
        until_s = time.monotonic() + self.seconds
        while time.monotonic() < until_s:
            await asyncio.sleep(self.chance.uniform(0.1, 3.0))
            stops = self.chance.random() < 1 / 3
            kind = self.chance.choice(STOPPED if stops else KINDS)
            if time.monotonic() - self.last_s.get(kind, 0.0) < REST_S.get(kind, 0.0):
                continue
            victim = await asyncio.to_thread(self.server.victim, kind, self.chance)
            if victim is None:
                continue
            self.last_s[kind] = time.monotonic()
            if stops:
                self.stopped[kind] += 1
                await self._stop(victim)
            else:
                self.killed[kind] += 1
                self.server.kill(victim)
        self.over = True

    async def _stop(self, victim: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.chance.uniform(0.2, STOP_MOST_S))
            finally:
                os.kill(victim, signal.SIGCONT)

    async def use(self, client: openai.AsyncOpenAI) -> None:
        """Requests of all kinds, one after the other, until it is over."""
        while not self.over:
            ask = self.chance.choice(ASKS)
            began_s = time.monotonic()
            try:
                answer = await send(client, ask)
            except (openai.APIConnectionError, httpx.TransportError) as error:
                self._broken(ask, error, began_s)
            except openai.APIError as error:
                self._refused(ask, error)
                await asyncio.sleep(0.5)
            else:
                self.ends["answered"] += 1
                if answer != self.expected[ask.name]:
                    self.differing.append((ask, answer))

    def _broken(self, ask: Ask, error: Exception, began_s: float) -> None:
        """Only a front door's own death (or a stop of it) may break a connection."""
        self.ends["broken"] += 1
        if self.last_s.get("front", 0.0) < began_s - REST_S["front"]:
            took_s = time.monotonic() - began_s
            self.faults.append(f"{ask.name}: a connection broke by itself after {took_s:.1f} s: {error!r}")

    def _refused(self, ask: Ask, error: openai.APIError) -> None:
        self.ends[f"refused: {error.code}"] += 1
        if not error.code or error.code == "internal_error":
            self.faults.append(f"{ask.name}: an unclear error: {error!r}")


async def storm(server: Server, models: Path, seconds: float, seed: int) -> Storm:
    """The calm, the storm, and what became of it: ``faults`` must be empty afterwards."""
    async with server.async_client() as client:
        expected = {ask.name: await send(client, ask) for ask in ASKS}
        again = {ask.name: await send(client, ask) for ask in ASKS}
    found = Storm(server, random.Random(seed), seconds, expected)
    found.faults += [f"{name}: the undisturbed server answers differently each time" for name in expected
                     if expected[name] != again[name]]  # fmt: skip
    async with server.async_client() as client, asyncio.TaskGroup() as group:
        group.create_task(found.rage())
        for _ in range(CLIENTS):
            group.create_task(found.use(client))
    await asyncio.to_thread(all_is_well_again, server, models)
    async with server.async_client() as client:
        for ask, answer in found.differing:
            tie = await undecided(client, ask, expected[ask.name], answer)
            found.ends["undecided" if tie.near else "wrong"] += 1
            print(f"{ask.name}: {tie}")
            if not tie.near:
                found.faults.append(f"{ask.name}: {answer.text!r} is not {expected[ask.name].text!r} ({tie})")
    return found


def storm_catalog(models: Path) -> dict[str, object]:
    """The demo models on two devices that hold two of them each, with everything that the asks use."""
    return catalog(models, tool_call_parser="qwen25")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and stop the processes of a server under mixed load.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    models = REPO / "demo-models"
    if not (models / ".complete").exists():
        subprocess.run([sys.executable, "scripts/make_demo_models.py", str(models)], cwd=REPO, check=True)
    with tempfile.TemporaryDirectory(prefix="prism-storm-") as folder:
        server = start(Path(folder), storm_catalog(models))
        try:
            found = asyncio.run(storm(server, models, options.seconds, options.seed))
        finally:
            server.stop()
    print(f"killed {dict(found.killed)}, stopped {dict(found.stopped)}; requests: {dict(found.ends)}")
    print("\n".join(found.faults) or "no fault")
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
