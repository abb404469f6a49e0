"""How long do streams stand still when an engine takes over layers that a peer ran for it, beside the estimate by which
the way is chosen (the mode switch of lambda-Scale 4.4)?

    python -m benchmarks.live.switch [--rounds 3] [--tokens 100 400 700] [--layers 7 2] [--streams 1 4] [--models DIR]

A leader with the first of a wide model's eight layers (64 KiB of KV a token, :mod:`tests.engine.wide`) answers over an
engine that has all of them. In mid-answer the rest of its weights is there at once, or, for fewer layers, that of the
others first. Both ways, forced in turns within one run. A gap is the time between two tokens of a stream: by the
engine's clock when it made them, and by the client's when it had them. The switch is all that happens
from the arrival of the weights until five tokens after the engine said that it is alone: pieces are brought, KV is
fetched in slices or made again. The longest gap of any stream then is the pause, the median of all gaps before it the
usual gap, and the longest of as many before it what the machine does to streams by itself. What the engine estimated is
for the KV alone, a slice of it or all, so that a pause is compared with estimate and usual gap together. A line shows
the round whose ratio is the middle one, and the ratios of all.
Goal: no pause longer than 1.3 times that.

Last result: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.demo_models import given_models, pool_spec
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.pace import DevicePace
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.api import Work
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.remote.orders import KvWay, RouteStop
from prism.remote.state import LayersTaken
from prism.weights.store.weight_store import WeightStore
from prism.wire.mailbox import Inbox
from prism.wire.messages import Tokens
from tests.engine.rig import codec, tokenized
from tests.engine.slow_image import SlowImage
from tests.engine.wide import make_wide_model
from tests.patience import happens

LAYERS: Final = 8
HEAD: Final = LAYERS + 1
DEVICE_BYTES: Final = 512 << 20
BEFORE: Final = 40
"""Tokens of a stream before the switch."""
BEHIND: Final = 5
ANSWER: Final = 200


@dataclass(slots=True)
class Stream:
    """When one request's tokens were made and came, by the wall clock."""

    made_s: list[float] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    over: bool = False


@dataclass(frozen=True, slots=True)
class Switch:
    """What one was like, in seconds."""

    taken: LayersTaken
    usual_s: float
    made_s: float
    """The longest pause by the engine's clock."""
    came_s: float
    """And by the client's."""
    before_s: float
    """The longest gap of as many before the switch, by the engine's clock."""

    @property
    def ratio(self) -> float:
        return self.made_s / (self.taken.estimated_s + self.usual_s)


def gaps(times_s: list[float], first_s: float, end_s: float) -> list[float]:
    """Times between neighbours, of those that reach into [first, end)."""
    return [b - a for a, b in itertools.pairwise(times_s) if b > first_s and a < end_s]


class SwitchBed:
    """Two devices and a client."""

    def __init__(self, folder: Path, model: Path, pace: DevicePace | None = None, **engine_args: Any) -> None:
        self.folder, self.spec = folder, pool_spec(model, dtype="float32", **engine_args)
        self.devices = [DeviceId(f"local/host:{i}") for i in range(2)]
        options = PoolOptions(run_dir=folder / "run", account_dir=folder / "accounts", store_dir=folder / "store")
        specs = [DeviceSpec(d, NodeId("local"), DeviceKind.HOST, DEVICE_BYTES, pace=pace) for d in self.devices]
        self.pool = EnginePool(specs, options)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self.streams: dict[str, Stream] = {}
        self.number = 0

    async def read(self) -> None:
        async for message in self.inbox:
            assert isinstance(message, Tokens)
            now_s = time.time()
            for item in message.items:
                stream = self.streams[item.id]
                stream.made_s += [item.engine_time_s] * len(item.token_ids)
                stream.came_s += [now_s] * len(item.token_ids)
                stream.over |= item.finish is not None

    async def activate(self, device: int, first_pieces: tuple[int, ...] = ()) -> EngineHandle:
        self.number += 1
        key, (part,) = InstanceKey(self.spec.name, Generation(self.number)), whole_model([self.devices[device]])
        return await self.pool.activate(key, self.spec, part, first_pieces=first_pieces)

    def ask(self, handle: EngineHandle, prompt: int, answer: int) -> Stream:
        """A prompt that no other one begins like."""
        self.number += 1
        rid = f"r{self.number}"
        stream = self.streams[rid] = Stream()
        tokens = [(7919 * self.number + 13 * i * (1 + self.number % 7)) % 900 + 10 for i in range(prompt)]
        handle.submit(Work(rid, codec().encode_request(tokenized(rid, tokens, answer)), self.inbox.address, 0, ()))
        return stream

    async def switch(self, whole: EngineHandle, way: KvWay, prompt: int, layers: int, streams: int) -> Switch:
        """One leader from its beginning to its end."""
        async with AsyncExitStack() as stack:
            image = SlowImage(WeightStore(self.folder / "store"), self.spec.name)
            stack.callback(image.close)
            image.arrive(0, 1, HEAD)
            leader = await self.activate(1, (0, 1, HEAD))
            stack.push_async_callback(leader.deactivate)
            path = str(self.folder / "whole.layers")
            await leader.remote.set_route(
                [RouteStop("", 0, 2), RouteStop(path, 2, HEAD), RouteStop("", HEAD, HEAD + 1)]
            )
            asked = [self.ask(leader, prompt, ANSWER) for _ in range(streams)]
            early = range(2, HEAD - layers)
            if early:
                await leader.remote.grow_route(KvWay.FETCH)
                await asyncio.to_thread(image.arrive, *early)
                await happens(lambda: _layers(leader) == 1 + len(early), "the first layers")
            await happens(lambda: all(len(s.made_s) >= BEFORE for s in asked), "tokens before the switch")
            await leader.remote.grow_route(way)
            began_s = time.time()
            await asyncio.to_thread(image.arrive, *range(HEAD - layers, HEAD))
            await happens(lambda: _alone(leader), "the switch")
            counts = [len(s.made_s) + BEHIND for s in asked]
            await happens(
                lambda: all(len(s.made_s) >= n or s.over for s, n in zip(asked, counts, strict=True)),
                "tokens behind it",
            )
            end_s = time.time()
            assert leader.load and leader.load.remote and leader.load.remote.taken
            assert not any(s.over for s in asked), "an answer ended within the switch: it is too short"
            await happens(lambda: all(s.over for s in asked), "all answers")
            before = [g for s in asked for g in gaps(s.made_s[BEFORE // 4 :], 0.0, began_s)]
            made = [g for s in asked for g in gaps(s.made_s, began_s, end_s)]
            return Switch(
                taken=leader.load.remote.taken,
                usual_s=statistics.median(before),
                made_s=max(made),
                came_s=max(g for s in asked for g in gaps(s.came_s, began_s, end_s)),
                before_s=max(before[-len(made) :]),
            )


def _layers(leader: EngineHandle) -> int:
    return leader.load.remote.held_layers if leader.load and leader.load.remote else 0


def _alone(leader: EngineHandle) -> bool:
    return bool(leader.load and leader.load.remote and leader.load.remote.alone)


async def measure(models: Path, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-switch-") as folder:
        bed = SwitchBed(Path(folder), make_wide_model(models, Path(folder) / "wide-llama"))
        await bed.pool.start()
        reading = asyncio.create_task(bed.read())
        try:
            await (await bed.activate(1)).deactivate()  # it leaves an image
            whole = await bed.activate(0)
            bed.pool.memory[bed.devices[0]].offer(0)
            await whole.remote.serve_layers(Path(folder) / "whole.layers")
            await bed.switch(whole, KvWay.FETCH, 50, LAYERS - 1, 1)  # what only the first pays
            print(
                "way        streams tokens layers    MiB  usual ms (longest)  estimate ms  pause ms (client's)  ratio"
            )
            for streams in options.streams:
                for tokens in options.tokens:
                    for layers in options.layers:
                        await _compare(bed, whole, options.rounds, tokens, layers, streams)
        finally:
            reading.cancel()
            await bed.pool.close()
            bed.inbox.close()


async def _compare(bed: SwitchBed, whole: EngineHandle, rounds: int, tokens: int, layers: int, streams: int) -> None:
    found: dict[KvWay, list[Switch]] = {KvWay.FETCH: [], KvWay.RECOMPUTE: []}
    for _ in range(rounds):
        for way, switches in found.items():
            gc.collect()
            switches.append(await bed.switch(whole, way, tokens, layers, streams))
    for way, switches in found.items():
        middle = sorted(switches, key=lambda s: s.ratio)[len(switches) // 2]
        taken = middle.taken
        head = f"{way:10} {streams:7} {tokens:6} {taken.layers:6} {taken.tokens * taken.layers / 128:6.1f}"
        usual = f"{1e3 * middle.usual_s:9.1f} ({1e3 * middle.before_s:.1f})"
        pause = f"{1e3 * taken.estimated_s:12.1f} {1e3 * middle.made_s:9.1f} ({1e3 * middle.came_s:.1f})"
        ratios = ", ".join(f"{s.ratio:.2f}" for s in switches)
        print(
            f"{head} {usual} {pause} {middle.ratio:8.2f}   all: {ratios}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Pauses of streams when an engine takes over layers.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 400, 700], help="of each prompt")
    parser.add_argument("--layers", type=int, nargs="+", default=[7, 2], help="that the peer runs until the switch")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="requests that are answered")
    parser.add_argument("--models", type=Path, help="folder of the demo models")
    options = parser.parse_args()
    asyncio.run(measure(given_models(options.models), options))


if __name__ == "__main__":
    main()
