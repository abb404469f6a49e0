"""When does a conversation's next turn begin to answer: with its cache on the device, after its model was evicted and
came back, and computed again?

    python -m benchmarks.kv.next_turn [--rounds 15] [--tokens 600 1500] [--models DIR]

One engine of demo-llama. Each round: a first turn; its next turn at once (*on the device*); the model leaves and comes
back; the next turn of the same conversation (*brought back*); the model leaves and comes back with an empty pool; the
same turn again (*computed*). Times are from handing the request to the engine to its first token here; activation is
not in them. Goal: brought back at most 1.3 times on the device.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo_models import given_models, pool_spec
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.api import Work
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import KvSettings, write_kv_settings
from prism.wire.mailbox import Inbox
from prism.wire.messages import Tokens
from tests.engine.rig import codec, tokenized

DEVICE = DeviceId("local/host:0")
NAME = "demo-llama"
ANSWER = 16
WAYS = ("on the device", "brought back", "computed")


class Chat:
    """An engine pool, a mailbox, and one conversation at a time."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.accounts = folder / "accounts"
        options = PoolOptions(run_dir=folder / "run", account_dir=self.accounts, store_dir=folder / "store")
        self.pool = EnginePool([DeviceSpec(DEVICE, NodeId("local"), DeviceKind.HOST, 256 << 20)], options)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self._messages = aiter(self.inbox)
        self.spec = pool_spec(models / NAME)
        self.number = 0

    async def activate(self) -> EngineHandle:
        self.number += 1
        key, (part,) = InstanceKey(self.spec.name, Generation(self.number)), whole_model([DEVICE])
        handle = await self.pool.activate(key, self.spec, part)
        await self.turn(handle, range(20, 60))  # what only the first request after an activation pays
        return handle

    async def turn(self, handle: EngineHandle, prompt: Sequence[int]) -> tuple[float, list[int], int]:
        """Seconds to the first token, the answer, and the prompt's tokens that were cached."""
        self.number += 1
        rid, tokens, cached = f"r{self.number}", list[int](), 0
        start_s, first_s = time.perf_counter(), 0.0
        payload = codec().encode_request(tokenized(rid, prompt, ANSWER))
        handle.submit(Work(rid, payload, self.inbox.address, 0, ()))
        async for message in self._messages:
            assert isinstance(message, Tokens)
            for item in (i for i in message.items if i.id == rid):
                first_s = first_s or time.perf_counter() - start_s
                tokens[item.start :] = item.token_ids
                cached = max(cached, item.cached_tokens)
                if item.finish is not None:
                    return first_s, tokens, cached
        raise AssertionError("the mailbox is closed")


async def measure_round(chat: Chat, tokens: int, seed: int) -> dict[str, float]:
    said = [(7 * seed + 13 * i * (1 + seed % 5)) % 900 + 10 for i in range(tokens)]
    found: dict[str, float] = {}
    handle = await chat.activate()
    _, answer, _ = await chat.turn(handle, said)
    following = [*said, *answer]
    asked = [*following, 5, 6, 7]
    found["on the device"], answer, cached = await chat.turn(handle, asked)
    assert cached >= len(following) - 1
    following = [*asked, *answer]
    await handle.deactivate()
    handle = await chat.activate()
    found["brought back"], _, cached = await chat.turn(handle, [*following, 8, 9, 10])
    assert cached >= len(following) - 1, f"{cached} of {len(following)} tokens came back"
    await handle.deactivate()
    drop_host_pool(chat.accounts)
    handle = await chat.activate()
    found["computed"], _, cached = await chat.turn(handle, [*following, 11, 12, 13])
    assert cached == 0
    await handle.deactivate()
    return found


async def run(models: Path, rounds: int, lengths: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        chat = Chat(Path(folder), models)
        write_kv_settings(chat.accounts, KvSettings(host_bytes=256 << 20))
        await chat.pool.start()
        try:
            print("| tokens said | " + " | ".join(f"{way}, ms" for way in WAYS) + " | brought back / on the device |")
            print("|---|" + "---|" * (len(WAYS) + 1))
            for tokens in lengths:
                results = [await measure_round(chat, tokens, seed) for seed in range(rounds + 1)][1:]
                medians = [1000 * statistics.median(r[way] for r in results) for way in WAYS]
                ratio = statistics.median(r["brought back"] / r["on the device"] for r in results)
                shown = " | ".join(f"{value:.1f}" for value in medians)
                print(f"| {tokens} | {shown} | {ratio:.2f} |", flush=True)
        finally:
            await chat.pool.close()
            chat.inbox.close()
            drop_host_pool(chat.accounts)


def main() -> None:
    parser = argparse.ArgumentParser(description="First token of a next turn, by where its cache is.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[600, 1500])
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.rounds, options.tokens))


if __name__ == "__main__":
    main()
