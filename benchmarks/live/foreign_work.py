"""What do the layers that an engine runs for others cost its own streams, beside the same work of an engine that shares
its device?

    python -m benchmarks.live.foreign_work [--rounds 3] [--tokens 50] [--leaders 1] [--slower 1]

An engine that has a whole model answers streams of its own, whose time per token is looked at, on a **paced** device
(what :data:`PACE` declares; no measurement of hardware). Three ways in turns within one run:

- *alone*: nothing else runs;
- *shared*: another engine of the same model on the same device has the load, all its layers there: devices give engines
  that share them turns, which is the fair share;
- *foreign*: an engine on another device, with the first of the layers only, has the load and leads it over the first.

With ``--leaders`` so many engines have each the whole load, in both ways. ``--slower`` makes the device slower, so that
what the cores really compute counts for less beside it. Loads are streams that decode, or prompts, four at a time.
Goal: the median time per token of *foreign* is at most 1.1 times that of *shared*.

Last result: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.demo_models import kept_models
from benchmarks.live.many_layers import many_layers
from benchmarks.live.switch import Stream, SwitchBed
from prism.core.pace import DevicePace
from prism.engine.handle import EngineHandle
from prism.remote.orders import RouteStop
from tests.patience import happens

LAYERS: Final = 8
HEAD: Final = LAYERS + 1
PACE: Final = DevicePace(layer_s=5e-3, prefill_token_s=0.3e-3, decode_sequence_s=100e-6)
CHUNK: Final = 32
"""Tokens of a prefill step at the most."""
WARM: Final = 10
"""Tokens of each stream that are not looked at."""


@dataclass(frozen=True, slots=True)
class Load:
    """What runs beside the streams that are looked at."""

    name: str
    at_once: int
    prompt: int
    answer: int


LOADS: Final = (
    Load("1 stream decodes", 1, 8, 100_000),
    Load("4 streams decode", 4, 8, 100_000),
    Load("prompts, four at a time", 4, CHUNK, 1),
)


@dataclass(slots=True)
class ForeignBed:
    """The engine that is looked at, those that share its device, and those that lead over it."""

    bed: SwitchBed
    own: EngineHandle
    others: dict[str, Sequence[EngineHandle]]

    async def token_s(self, way: str, load: Load, tokens: int, streams: int = 1) -> float:
        """The median time between two tokens of its own streams."""
        async with self._loaded(self.others[way], load):
            asked = [self.bed.ask(self.own, 8, tokens) for _ in range(streams)]
            await happens(lambda: all(s.over for s in asked), "all answers")
        return statistics.median(b - a for s in asked for a, b in itertools.pairwise(s.made_s[WARM:]))

    @asynccontextmanager
    async def _loaded(self, engines: Sequence[EngineHandle], load: Load) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask_again(one, load)) for one in engines for _ in range(load.at_once)]
        await asyncio.sleep(0.5 if tasks else 0.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_again(self, engine: EngineHandle, load: Load) -> None:
        while True:
            stream, rid = self._ask(engine, load)
            try:
                await happens(lambda: stream.over, "an answer")  # noqa: B023
            finally:
                with suppress(Exception):
                    engine.abort(rid)

    def _ask(self, engine: EngineHandle, load: Load) -> tuple[Stream, str]:
        stream = self.bed.ask(engine, load.prompt, min(load.answer, 1000))
        return stream, f"r{self.bed.number}"


def paced(slower: float) -> DevicePace:
    """What is declared, of a device that is so many times slower."""
    return DevicePace(**{name: seconds * slower for name, seconds in asdict(PACE).items()})


async def measure(folder: Path, options: argparse.Namespace) -> None:
    model = many_layers(kept_models(), folder / "model", LAYERS)
    bed = SwitchBed(folder, model, paced(options.slower), chunked_prefill_size=CHUNK)
    await bed.pool.start()
    reading = asyncio.create_task(bed.read())
    try:
        await (await bed.activate(1)).deactivate()  # it leaves an image
        own = await bed.activate(0)
        beside = [await bed.activate(0) for _ in range(options.leaders)]
        leaders = [await bed.activate(1) for _ in range(options.leaders)]
        bed.pool.memory[bed.devices[0]].offer(0)
        path = folder / "own.layers"
        await own.remote.serve_layers(path)
        route = [RouteStop("", 0, 2), RouteStop(str(path), 2, HEAD), RouteStop("", HEAD, HEAD + 1)]
        for leader in leaders:
            await leader.remote.set_route(route)
        scene = ForeignBed(bed, own, {"alone": (), "shared": beside, "foreign": leaders})
        await scene.token_s("foreign", LOADS[0], 3 * WARM)
        print("| own streams | beside them | alone, ms | shared, ms | foreign, ms | foreign / shared, each round |")
        print("|---|---|---|---|---|---|")
        for streams, load in itertools.product((1, 4), LOADS):
            found: dict[str, list[float]] = {way: [] for way in scene.others}
            for number in range(options.rounds):
                for way in list(found) if number % 2 == 0 else reversed(list(found)):
                    found[way].append(await scene.token_s(way, load, options.tokens, streams))
            middle = " | ".join(f"{1e3 * statistics.median(times_s):.1f}" for times_s in found.values())
            ratios = [a / b for a, b in zip(found["foreign"], found["shared"], strict=True)]
            each = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
            print(f"| {streams} | {load.name} | {middle} | {each} |", flush=True)
    finally:
        reading.cancel()
        await bed.pool.close()
        bed.inbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What foreign work costs an engine's own streams.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=50, help="of each stream that is looked at")
    parser.add_argument("--leaders", type=int, default=1)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    pace = paced(options.slower)
    print(f"{LAYERS} layers, {pace.words}, prefills of {CHUNK} tokens, {options.leaders} leaders")
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        asyncio.run(measure(Path(folder), options))


if __name__ == "__main__":
    main()
