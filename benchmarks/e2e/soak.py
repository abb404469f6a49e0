"""Question: do ten models on two devices that hold four of them lose a request, or ever exceed the cap?

    python -m benchmarks.e2e.soak --minutes 30 [--clients 4] [--kill] [--keep FOLDER]

Random traffic through HTTP: models by a Zipf law that turns every minute, random lengths, bursts and pauses; meanwhile
the scheduler evicts and migrates, and an operator moves loaded models to another device. Every answer is compared with
the first one its prompt got (greedy). Every second the physical memory behind each device is read from the kernel: the
blocks of its shared-memory files, not the account's own books. ``--kill`` also kills a random process (an engine, the
agent, the controller or Valkey) at random moments, every 20 s on average. Prints one JSON line: answers, latencies,
evictions and migrations by reason; ``--keep`` leaves the server's logs in FOLDER. Results in docs/results/e2e.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.demo_models import kept_models
from benchmarks.e2e.soak_summary import spread, summary
from tests.e2e.server import DEMOS, Server, catalog, start, stream

MOVE_EVERY_S = 3.0
KILL_EVERY_S = 20.0
VICTIMS = ("engine", "engine", "engine", "agent", "controller", "valkey")
"""What ``--kill`` may hit: engines as often as the rest together."""
MEMORY_MIB = 40
"""Per device: two of the demo models with some KV, so that the two devices hold four of the ten."""


@dataclass
class Tally:
    """What happened."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    """From sending to the first piece of text, answered requests only."""
    kills: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    """Models that an operator moved to the other device."""
    peak_bytes: Counter[str] = field(default_factory=Counter)
    seen: dict[tuple[str, str, int], str] = field(default_factory=dict)


def physical_bytes(server: Server) -> dict[str, int]:
    """Physical memory per virtual device by the kernel's count: blocks of the memfds the server's processes hold. Files
    are read one after the other: what moves from one to another meanwhile may count twice (:func:`settled_bytes`)."""
    return _by_device(_file_bytes(server))


def settled_bytes(server: Server, most_looks: int = 20) -> dict[str, int]:
    """As :func:`physical_bytes` of one moment: two looks in a row saw the same in every file. {}: they never did."""
    before = _file_bytes(server)
    for _ in range(most_looks):
        now = _file_bytes(server)
        if now == before:
            return _by_device(now)
        before = now
    return {}


def _file_bytes(server: Server) -> dict[tuple[str, int], int]:
    files: dict[tuple[str, int], int] = {}
    for pid in server.pids("prism: engine"):
        folder = Path(f"/proc/{pid}/fd")
        with suppress(OSError):
            for link in folder.iterdir():
                with suppress(OSError):
                    name = str(link.readlink())
                    if name.startswith("/memfd:prism host:"):
                        status = link.stat()
                        files[(name.removeprefix("/memfd:prism ").split()[0], status.st_ino)] = status.st_blocks * 512
    return files


def _by_device(files: dict[tuple[str, int], int]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (device, _), size in files.items():
        totals[device] += size
    return dict(totals)


async def client(
    server: Server, http: openai.AsyncOpenAI, names: list[str], tally: Tally, end_s: float, seed: int
) -> None:
    """One client: asks, checks, pauses."""
    chance = random.Random(seed)
    while time.monotonic() < end_s:
        turn = int(time.monotonic() // 60)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        model = chance.choices(order, [1 / (rank + 1) for rank in range(len(order))])[0]
        prompt, tokens = f"prompt {chance.randrange(40)} " * chance.randrange(1, 12), chance.randrange(1, 48)
        demo = next(d for d in DEMOS if model.startswith(d))
        pieces_s = [time.monotonic()]
        try:
            answer = await stream(http, model, prompt, tokens, _noting(pieces_s))
        except openai.RateLimitError as error:
            tally.refused[error.code or "429"] += 1
            await asyncio.sleep(1.0)
            continue
        except openai.APIStatusError as error:
            tally.lost.append(f"{model}: {error.status_code} {error.code} {error.message[:200]}")
            continue
        except (openai.APIError, AssertionError) as error:
            tally.lost.append(f"{model}: {type(error).__name__} {str(error)[:200]}")
            continue
        tally.answered += 1
        tally.first_token_s += [at_s - pieces_s[0] for at_s in pieces_s[1:2]]
        if tally.seen.setdefault((demo, prompt, tokens), answer) != answer:
            tally.wrong.append(f"{model}: {prompt[:40]!r}, {tokens} tokens")
        await asyncio.sleep(chance.expovariate(4.0) if chance.random() < 0.9 else chance.uniform(1.0, 6.0))


def _noting(times_s: list[float]) -> Callable[[int], None]:
    return lambda _: times_s.append(time.monotonic())


async def watch(server: Server, tally: Tally, end_s: float, kill: bool) -> None:
    """Reads the kernel's count every second; kills something now and then if asked."""
    chance, began_s = random.Random(1), time.monotonic()
    next_kill_s = began_s + 5.0
    while time.monotonic() < end_s:
        for device, size in (await asyncio.to_thread(physical_bytes, server)).items():
            tally.peak_bytes[device] = max(tally.peak_bytes[device], size)
        if kill and time.monotonic() >= next_kill_s:
            next_kill_s = time.monotonic() + chance.expovariate(1.0 / KILL_EVERY_S)
            name = chance.choice(VICTIMS)
            with suppress(httpx.HTTPError, ProcessLookupError):  # the front door is just being restarted
                if pids := await asyncio.to_thread(_pids, server, name):
                    server.kill(chance.choice(pids))
                    tally.kills[name] += 1
        if sys.stderr.isatty():
            print(f"\r{time.monotonic() - began_s:6.0f} s  {tally.answered} answered", end="", file=sys.stderr)
        await asyncio.sleep(chance.uniform(0.5, 1.5))


def _pids(server: Server, name: str) -> list[int]:
    """Processes that a kill of ``name`` may hit."""
    return server.pids("prism: engine") if name == "engine" else [server.named(name)]


async def move(server: Server, names: list[str], tally: Tally, end_s: float) -> None:
    """An operator who moves loaded models to the other device now and then, under the streams that run."""
    chance = random.Random(2)
    while time.monotonic() < end_s:
        await asyncio.sleep(chance.expovariate(1.0 / MOVE_EVERY_S))
        model = chance.choice(names)
        with suppress(httpx.HTTPError):  # the front door is just being restarted, or there is no room there now
            for replica in await asyncio.to_thread(server.replicas, model):
                other = "local/host:1" if replica["devices"][0].endswith(":0") else "local/host:0"
                await asyncio.to_thread(server.admin, f"models/{model}/load", {"devices": [other]})
                tally.moved += 1


async def traffic(server: Server, names: list[str], minutes: float, clients: int, kill: bool) -> Tally:
    tally, end_s = Tally(), time.monotonic() + minutes * 60
    async with server.async_client() as http, asyncio.TaskGroup() as group:
        group.create_task(watch(server, tally, end_s, kill))
        group.create_task(move(server, names, tally, end_s))
        for seed in range(clients):
            group.create_task(client(server, http, names, tally, end_s, seed))
    return tally


def soak_catalog(models: Path) -> dict[str, Any]:
    """Ten models, each a demo model under a name of its own."""
    config = catalog(models, memory=f"{MEMORY_MIB}MiB", copies=4)
    config["models"] = config["models"][:10]
    config["policy"] = {
        "min_residency": "500ms",
        "min_kv_tokens": 256,
        # Moves that pay are looked for often, among instances that live for seconds.
        "rebalance_every": "1s",
        "planning_window": "3s",
        "pressed_kv_share": 0.1,
    }
    return config


def result(tally: Tally, logs: Path, options: argparse.Namespace, free_bytes: dict[str, int]) -> dict[str, Any]:
    """The line that is printed."""
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "answered": tally.answered,
        "refused": dict(tally.refused),
        "lost": tally.lost,
        "wrong": tally.wrong,
        "kills": dict(tally.kills),
        "moved_by_operator": tally.moved,
        "first_token_s": spread(tally.first_token_s),
        **summary(logs),
        "cap_bytes": MEMORY_MIB << 20,
        "peak_physical_bytes": dict(tally.peak_bytes),
        "free_at_end": free_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--keep", type=Path, help="leave the server's logs in this folder")
    options = parser.parse_args()
    models = kept_models()
    config = soak_catalog(models)
    names = [str(m["name"]) for m in config["models"]]
    with tempfile.TemporaryDirectory(prefix="prism-soak-") as folder:
        server = start(Path(folder), config)
        try:
            tally = asyncio.run(traffic(server, names, options.minutes, options.clients, options.kill))
            free_bytes = {d["id"]: int(d["free_bytes"]) for d in server.admin("devices")["devices"]}
        finally:
            server.stop()
            if options.keep:
                shutil.copytree(server.state / "logs", options.keep, dirs_exist_ok=True)
        outcome = result(tally, server.state / "logs", options, free_bytes)
    print(json.dumps(outcome))
    over = {d: b for d, b in tally.peak_bytes.items() if b > MEMORY_MIB << 20}
    sys.exit(bool(tally.lost or tally.wrong or over))


if __name__ == "__main__":
    main()
