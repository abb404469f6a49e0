"""What do others pay beside a prompt that is larger than its device: requests of its engine, and of another model
of its device?

    python -m benchmarks.kv.long_beside [--rounds 5] [--tokens 512] [--models DIR]

An engine of a wide model (as in :mod:`benchmarks.kv.long_prompts`) and one of demo-llama on one virtual device; the
long prompt's KV is with a lender, so that a step of it takes as long as some ten of the others'. In each round a
request of each decodes alone, and then beside a long one that decodes. Told are time per token (the whole answer's over
its tokens, behind the first) and the longest gap between two tokens, beside and alone, and their ratio by round. By the
policy (:mod:`prism.policy.long_turns`) a request of the same engine pays 4/3 on average, and a step of the long one at
most between two of its tokens; one of another model pays what the processor and the memory are shared for.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.demo_models import given_models, pool_spec
from benchmarks.kv.long_prompts import DEVICES, LongBench
from prism.core.ids import Generation
from prism.core.instances import InstanceKey, whole_model
from prism.engine.api import Work
from prism.engine.handle import EngineHandle
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import DeclaredLinks
from prism.wire.messages import Tokens
from tests.engine.rig import codec, prompt, tokenized

LINKS: Final = DeclaredLinks(host=1e8, peer=1e9)
ANSWER: Final = 120
"""Tokens of a request that is looked at."""
LONG_ANSWER: Final = 450
"""Of the long one: longer than both that are looked at beside it."""


@dataclass(slots=True)
class Asked:
    """A request's tokens as they come."""

    times_s: list[float] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    @property
    def gap_s(self) -> float:
        return max(b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False))


class BesideBench(LongBench):
    """Several requests at once."""

    def __init__(self, folder: Path, models: Path) -> None:
        super().__init__(folder, models, LINKS, 0.0)
        self._small = pool_spec(models / "demo-llama")
        self._asked: dict[str, Asked] = {}

    async def read(self) -> None:
        """Until it is cancelled."""
        async for message in self.inbox:
            assert isinstance(message, Tokens)
            now_s = time.perf_counter()
            for item in message.items:
                if (asked := self._asked.get(item.id)) is not None:
                    asked.times_s += [now_s] * len(item.token_ids)
                    asked.began.set()
                    if item.finish is not None:
                        asked.done.set()

    async def neighbour(self) -> EngineHandle:
        """demo-llama on the long prompt's device."""
        self._number += 1
        key, (part,) = InstanceKey(self._small.name, Generation(self._number)), whole_model(DEVICES[:1])
        return await self.pool.activate(key, self._small, part)

    def submit(self, handle: EngineHandle, asked: Sequence[int], answer: int) -> tuple[str, Asked]:
        self._number += 1
        rid = f"b{self._number}"
        found = self._asked[rid] = Asked()
        handle.submit(Work(rid, codec().encode_request(tokenized(rid, asked, answer)), self.inbox.address, 0, ()))
        return rid, found

    async def answered(self, handle: EngineHandle, seed: int) -> Asked:
        _, asked = self.submit(handle, prompt(seed, 40), ANSWER)
        await asked.done.wait()
        return asked


async def measure(bench: BesideBench, tokens: int, rounds: int) -> None:
    handle, neighbour = await bench.activate(1), await bench.neighbour()
    reading = asyncio.create_task(bench.read())
    engines = {"of its engine": handle, "of another model": neighbour}
    found: dict[str, list[tuple[Asked, Asked]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        alone = {name: await bench.answered(engine, 10 + number) for name, engine in engines.items()}
        for name, engine in engines.items():
            rid, long = bench.submit(handle, prompt(3 + number, tokens), LONG_ANSWER)
            await long.began.wait()
            found[name].append((alone[name], await bench.answered(engine, 10 + number)))
            assert not long.done.is_set(), "the long request has ended before"
            handle.abort(rid)
            await long.done.wait()
    reading.cancel()
    await neighbour.deactivate()
    await handle.deactivate()
    print(
        "| request | alone, ms per token | beside | times | longest gap alone, ms | beside |\n|---|---|---|---|---|---|"
    )
    for name, pairs in found.items():
        measured = pairs[1:]
        alone_s, beside_s = (statistics.median(p[i].token_s for p in measured) for i in range(2))
        gaps_s = [statistics.median(p[i].gap_s for p in measured) for i in range(2)]
        times = statistics.median(b.token_s / a.token_s for a, b in measured)
        shown = (
            f"{1e3 * alone_s:.2f} | {1e3 * beside_s:.2f} | {times:.2f} | {1e3 * gaps_s[0]:.1f} | {1e3 * gaps_s[1]:.1f}"
        )
        print(f"| {name} | {shown} |", flush=True)


async def run(models: Path, tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        bench = BesideBench(Path(folder), models)
        await bench.pool.start()
        try:
            await measure(bench, tokens, rounds)
        finally:
            await bench.pool.close()
            bench.inbox.close()
            drop_host_pool(bench.accounts)


def main() -> None:
    parser = argparse.ArgumentParser(description="What others pay beside a long prompt.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.tokens, options.rounds))


if __name__ == "__main__":
    main()
