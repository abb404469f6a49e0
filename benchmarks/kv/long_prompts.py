"""How many tokens a second does a prompt that is larger than its device answer, with its KV in what another device
lends and in host memory (AQUA, Figure 9), and how near is that to what the link carries?

    python -m benchmarks.kv.long_prompts [--rounds 3] [--tokens 512 1024] [--answer 16] [--models DIR]

One engine of a wide model (64 KiB of KV a token, :mod:`tests.engine.wide`) with eight pages of KV, 256 tokens, on a
virtual device; another one lends. Both ways in turns within one run, links as declared: 100 MB/s to host memory and
1 GB/s to the lender. Each token reads the KV of all whole pieces before it, so that the limit is the rate over those
bytes; the first token takes the whole prompt, by chunks. Answers of both ways must be alike. Paper: 4 times.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.demo_models import given_models, pool_spec
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.settings import LongPromptPlace
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.api import Work
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.policy.long_prompts import WINDOW_SHARE, LongShape, plan_window
from prism.wire.mailbox import Inbox
from prism.wire.messages import Tokens
from tests.engine.rig import codec, prompt, tokenized
from tests.engine.wide import make_wide_model

DEVICES: Final = tuple(DeviceId(f"local/host:{i}") for i in range(2))
DEVICE_BYTES: Final = 256 << 20
HOST_BYTES: Final = 256 << 20
LINKS: Final = DeclaredLinks(host=1e8, peer=1e9)
RATES: Final = {LongPromptPlace.HOST: LINKS.host, LongPromptPlace.LENT: LINKS.peer}
SHAPE: Final = LongShape(layers=8, token_bytes=2 * 8 * 128 * 4)
PAGES: Final = 8


@dataclass(frozen=True, slots=True)
class LongAnswer:
    """One request's, in seconds."""

    first_s: float
    rest_s: float
    tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Behind the first."""
        return (len(self.tokens) - 1) / self.rest_s


class LongBench:
    """An engine pool on two devices and a mailbox; one activation at a time."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.accounts = folder / "accounts"
        options = PoolOptions(run_dir=folder / "run", account_dir=self.accounts, store_dir=folder / "store")
        devices = [DeviceSpec(d, NodeId("local"), DeviceKind.HOST, DEVICE_BYTES) for d in DEVICES]
        self.pool = EnginePool(devices, options)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self._messages = aiter(self.inbox)
        self._spec = pool_spec(make_wide_model(models, folder / "wide-llama"))
        self._number = 0

    async def activate(self, place: LongPromptPlace) -> EngineHandle:
        """An engine whose long prompts have their KV at ``place`` only: there is room for all of it."""
        self.pool.memory[DEVICES[1]].offer(DEVICE_BYTES // 10 if place is LongPromptPlace.LENT else None)
        links = {f"host:{i}": LINKS for i in range(2)}
        settings = KvSettings(host_bytes=HOST_BYTES, lend_keep_fraction=0.1, long_prompts=place, links=links)
        write_kv_settings(self.accounts, settings)
        self._number += 1
        key, (part,) = InstanceKey(self._spec.name, Generation(self._number)), whole_model(DEVICES[:1])
        limit = PAGES * self.pool.memory[DEVICES[0]].page_bytes
        handle = await self.pool.activate(key, self._spec, part, kv_limit_bytes=limit)
        await self.ask(handle, prompt(1, 40), 4)  # what only the first request after an activation pays
        return handle

    async def ask(self, handle: EngineHandle, asked: Sequence[int], answer: int) -> LongAnswer:
        self._number += 1
        rid, tokens, first_s = f"r{self._number}", list[int](), 0.0
        start_s = time.perf_counter()
        handle.submit(Work(rid, codec().encode_request(tokenized(rid, asked, answer)), self.inbox.address, 0, ()))
        async for message in self._messages:
            assert isinstance(message, Tokens)
            for item in (i for i in message.items if i.id == rid):
                now_s = time.perf_counter() - start_s
                first_s = first_s or now_s
                tokens[item.start :] = item.token_ids
                if item.finish is not None:
                    assert len(tokens) == answer, item.finish
                    return LongAnswer(first_s, now_s - first_s, tuple(tokens))
        raise AssertionError("the mailbox is closed")


def limit_tokens_per_s(bench: LongBench, tokens: int, bytes_per_s: float) -> float:
    """What the link carries: every token reads all whole pieces before it, ``tokens`` at the least."""
    plan = plan_window(SHAPE, PAGES * bench.pool.memory[DEVICES[0]].page_bytes // WINDOW_SHARE)
    assert plan is not None
    return bytes_per_s / SHAPE.bytes_of(plan.pieces(tokens) * plan.piece_tokens)


async def measure(bench: LongBench, tokens: int, answer: int, rounds: int) -> None:
    found: dict[LongPromptPlace, list[LongAnswer]] = {place: [] for place in RATES}
    for number in range(rounds):
        for place, answers in found.items():
            handle = await bench.activate(place)
            answers.append(await bench.ask(handle, prompt(3 + number, tokens), answer))
            await handle.deactivate()
        assert len({answers[-1].tokens for answers in found.values()}) == 1, "both ways answer alike"
    for place, answers in found.items():
        rate = statistics.median(a.tokens_per_s for a in answers)
        limit = limit_tokens_per_s(bench, tokens, RATES[place])
        first_s = statistics.median(a.first_s for a in answers)
        print(
            f"| {tokens} | {place.value} | {first_s:.2f} | {rate:.2f} | {limit:.2f} | {rate / limit:.2f} |", flush=True
        )
    pairs = zip(found[LongPromptPlace.LENT], found[LongPromptPlace.HOST], strict=True)
    ratio = statistics.median(lent.tokens_per_s / host.tokens_per_s for lent, host in pairs)
    print(f"lent / host, {tokens} tokens, median of rounds: {ratio:.2f}", flush=True)


async def run(models: Path, lengths: Sequence[int], answer: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        bench = LongBench(Path(folder), models)
        await bench.pool.start()
        try:
            print("| tokens | KV | first token, s | tokens/s | limit of the link | of it |")
            print("|---|---|---|---|---|---|")
            for tokens in lengths:
                await measure(bench, tokens, answer, rounds)
        finally:
            await bench.pool.close()
            bench.inbox.close()
            drop_host_pool(bench.accounts)


def main() -> None:
    parser = argparse.ArgumentParser(description="A long prompt's throughput, by where its KV is.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.tokens, options.answer, options.rounds))


if __name__ == "__main__":
    main()
