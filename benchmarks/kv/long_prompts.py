"""How many tokens a second does a prompt that is larger than its device answer, with its KV in host memory and in what
one and two other devices lend (AQUA, Figure 9), and how near is that to what the links carry?

    python -m benchmarks.kv.long_prompts [--rounds 3] [--tokens 512 1024] [--answer 16] [--models DIR]
                                         [--host-mb 100] [--peer-mb 1000] [--share-mb 0]

One engine of a wide model (64 KiB of KV a token, :mod:`tests.engine.wide`) with eight pages of KV, 256 tokens, on a
virtual device; others lend. All ways in turns within one run, links as declared, MB/s; ``--share-mb``: what each lender
gives of its memory's bandwidth (0: all that the link carries). Where a lender gives so little that another place adds
to it, KV is dealt over both. Each token reads the KV of all whole pieces before it, so that the limit is the sum of the
rates over those bytes; the first token takes the whole prompt, by chunks. Answers of all ways must be alike. Paper: 4
times.

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
from prism.policy.long_places import bytes_per_s
from prism.policy.long_prompts import WINDOW_SHARE, LongShape, plan_window
from prism.policy.moving import lent_rate
from prism.wire.mailbox import Inbox
from prism.wire.messages import Tokens
from tests.engine.rig import codec, prompt, tokenized
from tests.engine.wide import make_wide_model

DEVICES: Final = tuple(DeviceId(f"local/host:{i}") for i in range(3))
DEVICE_BYTES: Final = 256 << 20
HOST_BYTES: Final = 256 << 20
MEMORY_BYTES_S: Final = 1e11
"""Of a device, as declared, where it gives a share."""
WAYS: Final = {0: "host memory", 1: "a lender", 2: "two lenders"}
"""By how many devices lend."""
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

    def __init__(self, folder: Path, models: Path, links: DeclaredLinks, share: float) -> None:
        """``share``: what lenders give of their memory's bandwidth."""
        self.links, self.share = links, share
        self.accounts = folder / "accounts"
        options = PoolOptions(run_dir=folder / "run", account_dir=self.accounts, store_dir=folder / "store")
        devices = [DeviceSpec(d, NodeId("local"), DeviceKind.HOST, DEVICE_BYTES) for d in DEVICES]
        self.pool = EnginePool(devices, options)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self._messages = aiter(self.inbox)
        self._spec = pool_spec(make_wide_model(models, folder / "wide-llama"))
        self._number = 0

    async def activate(self, lenders: int) -> EngineHandle:
        """An engine for whose long prompts so many devices lend: one has room for all of it."""
        for number, device in enumerate(DEVICES[1:]):
            self.pool.memory[device].offer(DEVICE_BYTES // 10 if number < lenders else None)
        settings = KvSettings(
            host_bytes=HOST_BYTES,
            lend_keep_fraction=0.1,
            lend_rate_fraction=self.share,
            long_prompts=LongPromptPlace.LENT if lenders else LongPromptPlace.HOST,
            links={f"host:{i}": self.links for i in range(len(DEVICES))},
        )
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

    def bytes_per_s(self, lenders: int) -> float:
        """What the links carry, as KV is dealt."""
        rate = lent_rate(self.links.peer, self.share * self.links.memory)
        return bytes_per_s([*[rate] * lenders, self.links.host])

    def limit_tokens_per_s(self, tokens: int, lenders: int) -> float:
        """Every token reads all whole pieces before it, ``tokens`` at the least."""
        plan = plan_window(SHAPE, PAGES * self.pool.memory[DEVICES[0]].page_bytes // WINDOW_SHARE)
        assert plan is not None
        return self.bytes_per_s(lenders) / SHAPE.bytes_of(plan.pieces(tokens) * plan.piece_tokens)


async def measure(bench: LongBench, tokens: int, answer: int, rounds: int) -> None:
    found: dict[int, list[LongAnswer]] = {lenders: [] for lenders in WAYS}
    for number in range(rounds):
        for lenders, answers in found.items():
            handle = await bench.activate(lenders)
            answers.append(await bench.ask(handle, prompt(3 + number, tokens), answer))
            await handle.deactivate()
        assert len({answers[-1].tokens for answers in found.values()}) == 1, "all ways answer alike"
    for lenders, answers in found.items():
        rate = statistics.median(a.tokens_per_s for a in answers)
        limit = bench.limit_tokens_per_s(tokens, lenders)
        first_s = statistics.median(a.first_s for a in answers)
        pairs = zip(answers, found[0], strict=True)
        ratio = statistics.median(lent.tokens_per_s / host.tokens_per_s for lent, host in pairs)
        row = f"{first_s:.2f} | {rate:.2f} | {ratio:.2f} | {limit:.2f} | {rate / limit:.2f}"
        print(f"| {tokens} | {WAYS[lenders]} | {row} |", flush=True)


async def run(
    models: Path, lengths: Sequence[int], answer: int, rounds: int, links: DeclaredLinks, share: float
) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        bench = LongBench(Path(folder), models, links, share)
        await bench.pool.start()
        try:
            print("| tokens | KV | first token, s | tokens/s | times host memory's | limit of the links | of it |")
            print("|---|---|---|---|---|---|---|")
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
    parser.add_argument("--host-mb", type=float, default=100.0, help="MB/s of the link to host memory")
    parser.add_argument("--peer-mb", type=float, default=1000.0, help="MB/s of the link to each other device")
    parser.add_argument(
        "--share-mb", type=float, default=0.0, help="MB/s that a lender gives; 0: what its link carries"
    )
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    memory_bytes_s = MEMORY_BYTES_S if options.share_mb else 0.0
    links = DeclaredLinks(host=options.host_mb * 1e6, peer=options.peer_mb * 1e6, memory=memory_bytes_s)
    share = options.share_mb * 1e6 / MEMORY_BYTES_S
    asyncio.run(run(given_models(options.models), options.tokens, options.answer, options.rounds, links, share))


if __name__ == "__main__":
    main()
