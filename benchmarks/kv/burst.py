"""A burst of twice the stable rate: when do requests get their first token, first come first served or taking turns,
over a link to host memory or ten times that to a device that lends (AQUA, Figure 8)?

    python -m benchmarks.kv.burst [--rate 0] [--before 25] [--burst-s 0] [--rounds 1] [--models DIR]

One engine of demo-llama on a virtual device with room for a dozen usual requests, as two H100s have beside Llama-70B;
beside it one that lends. Answers are as long as ShareGPT's (:mod:`prism.trace.lengths`), prompts an eighth of its, so
that the longest of both fit the model's context. Requests come at the stable rate, and then at twice that for a burst.
The stable rate is the largest (by halving) at which waits do not grow: a request of the second half of 40 s waits half
a second at most on average, first come first served. ``--rate`` says it instead. The burst is as many steps long as the
paper's minute is on its GPUs (BURST_STEPS), since what an order of service can do depends on how long a burst is beside
an answer; ``--burst-s`` says its seconds instead. The same requests at the same times each way: *first come* (requests
stay until they end), *fair, host* and *fair, peer*; each round has other lengths.
Times per output token are of whole answers, behind the first token.
Goal: highest first-token time over the peer at most 1/20 of first come's, time per token at most 1.2 times, and both
better than over host memory. The paper: 20 times, and up to 1.5 times better per token than over host memory.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.demo_models import given_models, pool_spec
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.pace import DevicePace
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec, Scheduling
from prism.engine.api import Work
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.trace.lengths import length_table
from prism.wire.mailbox import Inbox
from prism.wire.messages import Tokens
from tests.engine.rig import codec, tokenized

NAME = "demo-llama"
HOST_BYTES_S: Final = 160e6
PEER_TIMES: Final = 10
KV_PAGES: Final = 17
PROMPT_SHARE: Final = 8
"""Prompts are so many times shorter than ShareGPT's."""
BURST_STEPS: Final = 1500
"""A minute of steps of 40 ms, which is what Llama-70B takes on two H100s (benchmarks.kv.burst_model)."""
DEVICE_BYTES: Final = 256 << 20
STABLE_WAIT_S: Final = 0.5
WAYS = ("first come", "fair, host", "fair, peer")


@dataclass(slots=True)
class BurstRequest:
    """One request of a run."""

    sent_s: float
    tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    """When its tokens came, those of one step together."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(1, self.tokens - 1)


class BurstBed:
    """Devices, by default two of which the first has one engine at a time, and what was asked."""

    def __init__(self, folder: Path, spec: ModelSpec, devices: list[DeviceId], pace: DevicePace | None) -> None:
        self.accounts = folder / "accounts"
        self.devices = devices
        options = PoolOptions(run_dir=folder / "run", account_dir=self.accounts, store_dir=folder / "store")
        specs = [DeviceSpec(d, NodeId("local"), DeviceKind.HOST, DEVICE_BYTES, pace=pace) for d in self.devices]
        self.pool = EnginePool(specs, options)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self.spec = spec
        self.number = 0
        self.asked: dict[str, BurstRequest] = {}

    async def read(self) -> None:
        async for message in self.inbox:
            assert isinstance(message, Tokens)
            now_s = time.perf_counter()
            for item in message.items:
                asked = self.asked[item.id]
                asked.times_s.append(now_s)
                asked.tokens = max(asked.tokens, item.start + len(item.token_ids))
                if item.finish is not None:
                    asked.done.set()

    async def activate(self, way: str) -> EngineHandle:
        fair = way != "first come"
        peer = HOST_BYTES_S * PEER_TIMES if way == "fair, peer" else 0.0
        links = {"host:0": DeclaredLinks(host=HOST_BYTES_S, peer=peer)}
        keep = 0.1 if peer else None
        settings = KvSettings(host_bytes=DEVICE_BYTES if fair else 0, lend_keep_fraction=keep, links=links)
        write_kv_settings(self.accounts, settings)
        lender = self.pool.memory[self.devices[1]]
        lender.offer(DEVICE_BYTES // 10 if peer else None)
        handle = await self.serve(replace(self.spec, scheduling=Scheduling.FAIR if fair else Scheduling.DEADLINE))
        handle.set_kv_limit(KV_PAGES * self.pool.memory[self.devices[0]].page_bytes)
        for seed in range(8):  # what only the first requests after an activation pay, and rates that are measured
            await self.ask(handle, seed, 120, 10)
        return handle

    async def serve(self, spec: ModelSpec) -> EngineHandle:
        self.number += 1
        key, (part,) = InstanceKey(spec.name, Generation(self.number)), whole_model(self.devices[:1])
        return await self.pool.activate(key, spec, part)

    async def ask(self, handle: EngineHandle, seed: int, prompt: int, answer: int) -> BurstRequest:
        self.number += 1
        rid = f"r{self.number}"
        tokens = [(7919 * (seed + 1) + 13 * i * (1 + seed % 7)) % 900 + 10 for i in range(prompt)]
        asked = self.asked[rid] = BurstRequest(time.perf_counter())
        payload = codec().encode_request(tokenized(rid, tokens, answer))
        handle.submit(Work(rid, payload, self.inbox.address, 0, ()))
        await asked.done.wait()
        return asked

    async def play(self, handle: EngineHandle, times_s: list[float], seed: int) -> list[BurstRequest]:
        """The requests of ``seed`` at these times."""
        drawn, table = np.random.default_rng(seed), length_table("sharegpt")
        lengths = [table.draw(drawn) for _ in times_s]
        start_s = time.perf_counter()

        async def one(number: int, at_s: float) -> BurstRequest:
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            prompt, answer = lengths[number]
            return await self.ask(handle, 1000 * seed + number, max(1, prompt // PROMPT_SHARE), answer)

        return await asyncio.gather(*(one(i, at_s) for i, at_s in enumerate(times_s)))


@asynccontextmanager
async def open_bed(spec: ModelSpec, devices: list[DeviceId], pace: DevicePace | None = None) -> AsyncIterator[BurstBed]:
    """A bed in a folder of its own that reads what its engines say; at the end all of it is gone."""
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        bed = BurstBed(Path(folder), spec, devices, pace)
        await bed.pool.start()
        reader = asyncio.create_task(bed.read())
        try:
            yield bed
        finally:
            reader.cancel()
            await bed.pool.close()
            bed.inbox.close()
            drop_host_pool(bed.accounts)


def burst_bed(models: Path) -> AbstractAsyncContextManager[BurstBed]:
    """Two devices, for one engine of the demo model."""
    return open_bed(pool_spec(models / NAME), [DeviceId(f"local/host:{i}") for i in range(2)])


async def stable_rate(bed: BurstBed, seconds: float) -> float:
    """Requests a second at which waits do not grow, first come first served. A short look at all requests would call a
    rate stable at which the queue has only begun to grow; twice that is more than any order of service can hide."""
    handle = await bed.activate("first come")
    low, high = 0.2, 5.0
    for seed in range(5):
        rate = (low * high) ** 0.5
        found = await bed.play(handle, [i / rate for i in range(max(5, int(seconds * rate)))], seed)
        late = [a.ttft_s for a in found[len(found) // 2 :]]
        low, high = (rate, high) if statistics.mean(late) < STABLE_WAIT_S else (low, rate)
    await handle.deactivate()
    return low


async def step_s(bed: BurstBed, rate: float) -> float:
    """Seconds for a token while requests come at the stable rate."""
    handle = await bed.activate("first come")
    found = await bed.play(handle, [i / rate for i in range(20)], 7)
    await handle.deactivate()
    return statistics.median(a.tpot_s for a in found)


def arrivals(rate: float, before: int, burst_s: float) -> list[float]:
    times_s = [i / rate for i in range(before)]
    count = int(burst_s * 2 * rate)
    return times_s + [times_s[-1] + (i + 1) / (2 * rate) for i in range(count)]


async def run(models: Path, rate: float, before: int, burst_s: float, rounds: int) -> None:
    async with burst_bed(models) as bed:
        rate = rate or await stable_rate(bed, 40.0)
        burst_s = burst_s or BURST_STEPS * await step_s(bed, rate)
        times_s = arrivals(rate, before, burst_s)
        print(f"{rate:.2f} requests/s, then {2 * rate:.2f} for {burst_s:.0f} s: {len(times_s)} requests", flush=True)
        print("| round | way | highest first token, s | 90% | median | per token, median ms | mean | tokens paged in |")
        print("|---|---|---|---|---|---|---|---|")
        for number in range(rounds):
            for way in WAYS:
                handle = await bed.activate(way)
                found = await bed.play(handle, times_s, 77 + number)
                brought = 0 if handle.load is None else handle.load.kv_brought_tokens
                await handle.deactivate()
                drop_host_pool(bed.accounts)
                print(f"| {number + 1} {row(way, found, brought)}", flush=True)


def row(way: str, found: list[BurstRequest], brought: int) -> str:
    first = sorted(a.ttft_s for a in found)
    each = [1000 * a.tpot_s for a in found]
    shown = (first[-1], first[int(0.9 * len(first))], statistics.median(first))
    times = " | ".join(f"{value:.2f}" for value in shown)
    return f"| {way} | {times} | {statistics.median(each):.1f} | {statistics.mean(each):.1f} | {brought} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="First tokens in a burst, by scheduling and link.")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--before", type=int, default=25)
    parser.add_argument("--burst-s", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.rate, options.before, options.burst_s, options.rounds))


if __name__ == "__main__":
    main()
