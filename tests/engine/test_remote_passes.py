"""A peer runs the layers of several leaders in one pass, and each answers as if it were the only one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prism.core.pace import DevicePace
from prism.engine.handle import EngineHandle
from prism.remote.messages import HiddenStates, RunPieces
from tests.engine.rig import Rig, opened, prompt, tokenized
from tests.engine.test_remote_layers import NEW, Pair, pair
from tests.engine.test_remote_orders import greeted, heard, prefill
from tests.patience import happens

pytestmark = pytest.mark.engine


@asynccontextmanager
async def leaders(rig: Rig, name: str, count: int, **engine_args: Any) -> AsyncIterator[list[Pair]]:
    """So many engines, all to lead over one, which has everything."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(pair(rig, name, **engine_args))
        each = [first]
        for _ in range(count - 1):
            engine = await rig.activate(rig.spec(name, **engine_args), [rig.devices[1]])
            stack.push_async_callback(engine.deactivate)
            each.append(Pair(rig, name, first.whole, engine, first.path))
        yield each


async def share(p: Pair, least: int) -> None:
    await happens(lambda: shared(p.whole) >= least, "passes were shared", limit_s=60)


def along(engine: EngineHandle) -> int:
    return engine.load.remote.along if engine.load and engine.load.remote else 0


def shared(engine: EngineHandle) -> int:
    """Passes of several leaders, and own steps with any of them."""
    return along(engine) + (engine.load.remote.shared if engine.load and engine.load.remote else 0)


@pytest.mark.parametrize(
    ("name", "count"),
    [("demo-llama", 3), ("demo-qwen3", 2)],
)
async def test_several_decode_and_prefill_in_one_pass(rig: Rig, name: str, count: int) -> None:
    """Over different layers, with prompts of several chunks, prefixes in the tree, and requests of the peer's own."""
    async with leaders(rig, name, count, chunked_prefill_size=64) as each:
        head = each[0].pieces - 1
        for firsts in ((2, 2, 2), (1, 3, 2)):
            before = shared(each[0].whole)
            for p, first in zip(each, firsts, strict=False):
                await p.leader.remote.set_route(p.over(p.path, first, head))
            own = rig.submit(each[0].whole, tokenized("", prompt(9), NEW))
            await asyncio.gather(*(p.check((10 + i, 20, 30 + i), length=40) for i, p in enumerate(each)))
            assert await rig.answer(own) == rig.reference(name, prompt(9), NEW)
            await share(each[0], before + NEW // 2)


@pytest.mark.slow
async def test_one_prefills_while_another_decodes(zygote: Path, demo_models: Path) -> None:
    """The peer answers a stream of its own, so that what leaders ask waits for its steps."""
    async with (
        opened(zygote, demo_models, pace=DevicePace(layer_s=0.02)) as rig,
        leaders(rig, "demo-llama", 2, chunked_prefill_size=128) as (a, b),
    ):
        for p in (a, b):
            await p.leader.remote.set_route(p.over(p.path, 2, p.pieces - 1), whole_prefills=True)
        own, stream = (rig.submit(e, tokenized("", prompt(40), 3 * NEW)) for e in (a.whole, a.leader))
        await rig.wait_tokens(stream, 2)
        before = shared(a.whole)
        prompts = [prompt(41 + i, 70 + 9 * i) for i in range(8)]
        rids = [rig.submit(b.leader, tokenized("", q, 1)) for q in prompts]
        for rid, q in zip(rids, prompts, strict=True):
            assert await rig.answer(rid) == rig.reference(a.name, q, 1)
        for rid in (own, stream):
            assert await rig.answer(rid) == rig.reference(a.name, prompt(40), 3 * NEW)
        await share(a, before + 1)
        await happens(lambda: along(a.whole) > 1, "own steps take others along")


async def test_own_steps_take_leaders_along(zygote: Path, demo_models: Path) -> None:
    """Own prompts of several chunks and answers, beside prompts and answers of two leaders that lack other layers; one
    of these is killed in the middle."""
    async with (
        opened(zygote, demo_models, pace=DevicePace(layer_s=0.01)) as rig,
        leaders(rig, "demo-qwen3", 2, chunked_prefill_size=64) as (a, b),
    ):
        for p, first in ((a, 2), (b, 1)):
            await p.leader.remote.set_route(p.over(p.path, first, p.pieces - 1))
        own = [rig.submit(a.whole, tokenized("", prompt(60 + i), 2 * NEW)) for i in range(2)]
        for p in (a, b):
            await rig.wait_tokens(rig.submit(p.leader, tokenized("", prompt(65, 40), 4 * NEW)), 2)
        long = rig.submit(a.whole, tokenized("", prompt(70, 200), NEW))
        await asyncio.gather(*(a.check((i,), length=50 + 30 * i) for i in range(3)))
        await happens(lambda: along(a.whole) > NEW, "own steps take both along")
        os.kill(b.leader.pids[0], signal.SIGKILL)
        for rid, q in zip(own, (prompt(60), prompt(61)), strict=True):
            assert await rig.answer(rid) == rig.reference(a.name, q, 2 * NEW)
        assert await rig.answer(long) == rig.reference(a.name, prompt(70, 200), NEW)
        await a.check((7,))


@pytest.mark.slow
async def test_a_leader_killed_in_the_middle_of_a_pass(zygote: Path, demo_models: Path) -> None:
    """It is in a pass with two others when it dies, and these answer."""
    async with (
        opened(zygote, demo_models, pace=DevicePace(layer_s=0.05)) as rig,
        leaders(rig, "demo-llama", 3) as each,
    ):
        for p in each:
            await p.leader.remote.set_route(p.over(p.path, 1, p.pieces - 1))
        asked = [(p, rig.submit(p.leader, tokenized("", prompt(50 + i), NEW // 2))) for i, p in enumerate(each)]
        await happens(lambda: shared(each[0].whole) > 0, "passes are shared")
        await rig.wait_tokens(asked[2][1], 3)
        os.kill(each[2].leader.pids[0], signal.SIGKILL)
        for i, (p, rid) in enumerate(asked[:2]):
            assert await rig.answer(rid) == rig.reference(p.name, prompt(50 + i), NEW // 2)
        await happens(lambda: len(_leaders(each[0].whole)) == 2, "the third is forgotten")
        await each[0].check((1,))


async def test_what_waits_together_takes_one_pass(zygote: Path, demo_models: Path) -> None:
    """Leaders without engines ask while the peer is in a step for another one."""
    async with (
        opened(zygote, demo_models, pace=DevicePace(layer_s=0.05)) as rig,
        pair(rig, "demo-llama") as p,
        greeted(p.path) as first,
        greeted(p.path) as one,
        greeted(p.path) as other,
    ):
        head = p.pieces - 1
        for link in (one, other):
            link.send(prefill(1, head))
            assert isinstance(await heard(link), HiddenStates)
        first.send(prefill(2, head))
        await asyncio.sleep(0.2)  # it is in its first layers; had it not begun, they would join it
        for link in (one, other):
            link.send(decode(3, head))
        answers = [await heard(link) for link in (first, one, other)]
        assert [(type(answer), answer.batch) for answer in answers] == [(HiddenStates, n) for n in (2, 3, 3)]
        rid = rig.submit(p.whole, tokenized("", prompt(3), NEW))  # an engine that does nothing tells nothing
        assert await rig.answer(rid) == rig.reference(p.name, prompt(3), NEW)
        await share(p, 1)


def decode(batch: int, end: int) -> RunPieces:
    """The token behind the prompt of :func:`prefill`."""
    table: dict[str, Any] = {"table_rows": [0], "table_positions": [3], "table_slots": [4]}
    one: dict[str, Any] = {"rows": [0], "seq_lens": [4], "out_slots": [4], "positions": [3], "token_ids": [8]}
    return RunPieces(batch=batch, first=0, end=end, decode=True, **one, **table)


def _leaders(engine: EngineHandle) -> list[str]:
    return engine.load.remote.leaders if engine.load and engine.load.remote else []
