"""How much longer does a step take a running request while KV of others leaves and comes back beside it?

    python -m benchmarks.kv.beside [--rounds 9] [--every-s 0.25] [--models DIR]

One engine of demo-llama with room for one conversation of 900 tokens and a running request. In each round the request
decodes while turns of conversations are asked, a token each, one every ``--every-s`` seconds: of one conversation,
whose KV stays (*cached*); of two in turns, of which one is paged out and the other in each time (*moved*); of two with
nothing kept (*computed*). All ways are asked at the same times, so that each has as many turns a second to bear, and
the time per token of the running request is the whole window's over its tokens, so that nothing that holds it up is
left out; the ratio is that of each round's windows, which follow one another.
Goal: moved at most 1.1 times cached.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Final

from benchmarks.demo_models import given_models
from benchmarks.kv.burst import DEVICE_BYTES, BurstBed, burst_bed
from prism.engine.handle import EngineHandle
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import KvSettings, write_kv_settings
from tests.patience import happens

SAID_TOKENS: Final = 900
TURNS: Final = 6
ANSWER: Final = 400
"""Of the running request: longer than the window."""


async def window(bed: BurstBed, handle: EngineHandle, conversations: int, seed: int, every_s: float) -> float:
    """Seconds per token of the running request while TURNS turns are asked, one every ``every_s`` (later where the one
    before has not ended)."""
    for number in range(conversations):
        await bed.ask(handle, seed + number, SAID_TOKENS, 1)
    rid = f"r{bed.number + 1}"
    running = asyncio.create_task(bed.ask(handle, seed + 9, 30, ANSWER))
    await happens(lambda: rid in bed.asked and len(bed.asked[rid].times_s) >= 5, "the running request's first tokens")
    request = bed.asked[rid]
    start_s, before = time.perf_counter(), len(request.times_s)
    for turn in range(TURNS):
        await bed.ask(handle, seed + turn % conversations, SAID_TOKENS, 1)
        await asyncio.sleep(max(0.0, start_s + (turn + 1) * every_s - time.perf_counter()))
    assert not request.done.is_set(), "the running request has ended within the window"
    took_s = (time.perf_counter() - start_s) / max(1, len(request.times_s) - before)
    await running
    return took_s


async def run(models: Path, rounds: int, every_s: float) -> None:
    found: dict[str, list[float]] = {"cached": [], "moved": [], "computed": []}
    async with burst_bed(models) as bed:
        for number in range(rounds + 1):
            for way, times in found.items():
                keep = KvSettings(host_bytes=0 if way == "computed" else DEVICE_BYTES)
                write_kv_settings(bed.accounts, keep)
                handle = await bed.serve(bed.spec)
                handle.set_kv_limit(3 * bed.pool.memory[bed.devices[0]].page_bytes)
                for warm in range(4):
                    await bed.ask(handle, 50 + warm, 120, 5)
                times.append(await window(bed, handle, 1 if way == "cached" else 2, 1000 * number, every_s))
                await handle.deactivate()
                drop_host_pool(bed.accounts)
        print("| turns beside it | time per token, ms | times cached |\n|---|---|---|")
        for way, times in found.items():
            ratio = statistics.median(t / c for t, c in zip(times[1:], found["cached"][1:], strict=True))
            print(f"| {way} | {1000 * statistics.median(times[1:]):.2f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of a running request while KV moves beside it.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every-s", type=float, default=0.25)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.rounds, options.every_s))


if __name__ == "__main__":
    main()
