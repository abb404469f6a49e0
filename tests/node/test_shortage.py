"""The agent is told when memory has been short for a moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tests.patience import happens

from .conftest import Bench


async def test_a_shortage_that_lasts_makes_a_report_and_its_age_is_in_it(bench: Bench) -> None:
    told: list[float] = []
    bench.hasten_report = lambda: told.append(bench.shell.take_shortage_s())
    engine = bench.engine_up()
    await bench.submit("a")
    await happens(lambda: engine.works, "the request in the engine")
    bench.wanted_bytes = 1 << 20
    await happens(lambda: bench.shell.scheduler.shortage.is_short, "the engine's wish")
    await asyncio.sleep(0)
    assert not told, "by the bench's clock no time has passed"
    bench.now_s += 1.0
    await happens(lambda: told, "a report")
    assert told[0] >= 1.0
    bench.wanted_bytes = 0
    await happens(lambda: not bench.shell.scheduler.shortage.is_short, "the wish come true")
    bench.now_s += 1.0
    assert bench.shell.take_shortage_s() == 0.0


async def test_what_no_neighbours_kv_is_enough_for_is_a_shortage_too(bench: Bench) -> None:
    """Such a request is no wish in the account: the engine itself says what it lacks."""
    engine = bench.engine_up()
    await bench.submit("a")
    await happens(lambda: engine.works, "the request in the engine")
    engine.load = SimpleNamespace(lacks_bytes=1 << 20)
    await happens(lambda: bench.shell.scheduler.shortage.is_short, "what the engine lacks")
    engine.load = SimpleNamespace(lacks_bytes=0)
    await happens(lambda: not bench.shell.scheduler.shortage.is_short, "the end of it")
