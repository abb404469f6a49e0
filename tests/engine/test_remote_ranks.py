"""Engines of two ranks lead over each other: token for token, in one order on all ranks, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from prism.engine.handle import EngineHandle
from prism.remote.orders import KvWay, RouteStop
from prism.weights.store.weight_store import WeightStore
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.engine.slow_image import SlowImage
from tests.engine.test_remote_layers import SAMPLED, Pair, _alone, _leaders, _parts, lent_bytes
from tests.patience import happens

pytestmark = pytest.mark.engine
NAME, NEW = "demo-llama", 24
LOW, HIGH = (0, 1, 2, 5), (0, 1, 3, 4, 5)
"""Pieces of two engines that have all of them together."""


@asynccontextmanager
async def left_image(rig: Rig) -> AsyncIterator[AsyncExitStack]:
    """Both ranks' images are in the store, and everything is given back at the end."""
    first = await rig.activate(rig.spec(NAME, tp=2), rig.devices)
    await first.deactivate()
    async with AsyncExitStack() as stack:
        yield stack
    for i in range(2):
        await happens(lambda n=i: rig.free_bytes(n) == DEVICE_BYTES, "the books are exact")


async def engine(rig: Rig, stack: AsyncExitStack, name: str, pieces: tuple[int, ...] = ()) -> EngineHandle:
    """Serves its layers at ``rig.folder / name``."""
    handle = await rig.activate(rig.spec(NAME, tp=2), rig.devices, first_pieces=pieces)
    stack.push_async_callback(handle.deactivate)
    for device in rig.devices:
        rig.pool.memory[device].offer(0)
    await handle.remote.serve_layers(rig.folder / name)
    return handle


async def check_all(rig: Rig, rids: list[str], prompts: list[tuple[int, ...]], tokens: int) -> None:
    for rid, p in zip(rids, prompts, strict=True):
        assert await rig.answer(rid) == rig.reference(NAME, p, tokens)


@pytest.mark.slow
async def test_both_lead_over_each_other_and_one_loses_a_rank(rig: Rig) -> None:
    """Each waits for the other while it works for it; when a rank of one is killed, the other takes over its layers."""
    async with left_image(rig) as stack:
        low, high = await engine(rig, stack, "low", LOW), await engine(rig, stack, "high", HIGH)
        to_high = [RouteStop("", 0, 3), RouteStop(str(rig.folder / "high"), 3, 5), RouteStop("", 5, 6)]
        to_low = [RouteStop("", 0, 2), RouteStop(str(rig.folder / "low"), 2, 3), RouteStop("", 3, 6)]
        await asyncio.gather(low.remote.set_route(to_high), high.remote.set_route(to_low))
        pairs = [Pair(rig, NAME, high, low, rig.folder), Pair(rig, NAME, low, high, rig.folder)]
        await asyncio.gather(*(p.check((1, 2, 3, 4), length=40) for p in pairs))
        await asyncio.gather(*(p.check((5, 1), length=300) for p in pairs))  # in parts; one goes on from the tree
        await happens(lambda: _parts(low) > 1 and _parts(high) > 1, "prompts went in parts")
        for sampling in (SAMPLED, {"frequency_penalty": 1.5}, {"regex": "[a-z ]{40,60}"}):
            asked = [rig.submit(e, tokenized("", prompt(9, 60), NEW, **sampling)) for e in (low, high)]
            assert await rig.answer(asked[0]) == await rig.answer(asked[1])
        assert _leaders(low) == [high.workers[0]] and _leaders(high) == [low.workers[0]]
        prompts = [prompt(75 + i, 30 + 9 * i) for i in range(4)]
        rids = [rig.submit(e, tokenized("", p, 4 * NEW)) for e in (low, high) for p in prompts]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in rids))
        os.kill(low.pids[1], signal.SIGKILL)
        await high.remote.grow_route()
        await check_all(rig, rids[4:], prompts, 4 * NEW)
        await happens(lambda: _alone(high), "it goes on alone")
        await happens(lambda: lent_bytes(rig, 0) == lent_bytes(rig, 1) == 0, "what the dead had lent is back")
        assert not low.alive


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
async def test_a_leader_that_loses_a_rank_leaves_nothing_behind(rig: Rig, rank: int) -> None:
    async with left_image(rig) as stack:
        whole, leader = await engine(rig, stack, "whole"), await engine(rig, stack, "leader", (0, 1, 5))
        await leader.remote.set_route(
            [RouteStop("", 0, 2), RouteStop(str(rig.folder / "whole"), 2, 5), RouteStop("", 5, 6)]
        )
        rids = [rig.submit(leader, tokenized("", prompt(i, 40), 8 * NEW)) for i in range(3)]
        own = [rig.submit(whole, tokenized("", prompt(20 + i, 40), 4 * NEW)) for i in range(3)]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in (*rids, *own)))
        assert lent_bytes(rig, 0) > 0 and lent_bytes(rig, 1) > 0
        os.kill(leader.pids[rank], signal.SIGKILL)
        await check_all(rig, own, [prompt(20 + i, 40) for i in range(3)], 4 * NEW)
        await happens(lambda: lent_bytes(rig, 0) == lent_bytes(rig, 1) == 0, "nothing is kept for the dead")
        assert not leader.alive and whole.alive


@pytest.mark.slow
async def test_memory_that_one_rank_must_give_back_is_given_back_by_both(rig: Rig) -> None:
    """Only the second device wants it: both ranks of the peer drop what they keep, and the leader goes on alone."""
    async with left_image(rig) as stack:
        whole, leader = await engine(rig, stack, "whole"), await engine(rig, stack, "leader")
        p = Pair(rig, NAME, whole, leader, rig.folder / "whole")
        await leader.remote.set_route(p.over(p.path, 2, 5), p.alone())
        await leader.remote.hold_pieces(range(6))
        rids = [rig.submit(leader, tokenized("", prompt(i, 40), 8 * NEW)) for i in range(3)]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in rids))
        assert _leaders(whole) == [leader.workers[0]]
        rig.pool.memory[rig.devices[1]].offer(None)
        await happens(lambda: lent_bytes(rig, 0) == lent_bytes(rig, 1) == 0, "both gave it back")
        await check_all(rig, rids, [prompt(i, 40) for i in range(3)], 8 * NEW)
        assert await rig.ask(whole, tokenized("", prompt(1), NEW)) == rig.reference(NAME, prompt(1), NEW)


async def test_ranks_begin_early_together_or_not_at_all(rig: Rig) -> None:
    """The image of one of them is gone: the other one waits for all of its weights, too."""
    async with left_image(rig) as stack:
        store = WeightStore(rig.folder / "store")
        (lacking,) = (item.key for item in store.ls() if "rank1/" in item.key.layout)
        store.rm(lacking)
        handle = await engine(rig, stack, "early", (0, 1, 5))
        assert handle.began_with == ()
        assert await rig.ask(handle, tokenized("", prompt(1), NEW)) == rig.reference(NAME, prompt(1), NEW)


@pytest.mark.parametrize("kv", [KvWay.FETCH, pytest.param(KvWay.RECOMPUTE, marks=pytest.mark.slow)])
async def test_ranks_whose_weights_come_at_different_times_take_over_together(rig: Rig, kv: KvWay) -> None:
    async with left_image(rig) as stack:
        whole = await engine(rig, stack, "whole")
        images = [SlowImage(WeightStore(rig.folder / "store"), NAME, f"rank{rank}/") for rank in range(2)]
        for image in images:
            stack.callback(image.close)
            image.arrive(0, 1, 5)
        leader = await engine(rig, stack, "leader", (0, 1, 5))
        p = Pair(rig, NAME, whole, leader, rig.folder / "whole")
        prompts = [prompt(60 + i, 40 + 9 * i) for i in range(4)]
        rids = [rig.submit(leader, tokenized("", q, 5 * NEW)) for q in prompts]
        await leader.remote.set_route(p.over(p.path, 2, 5))
        await leader.remote.grow_route(kv)
        for i, piece in enumerate((3, 2, 4)):
            await rig.wait_tokens(rids[0], 15 * (i + 1))
            assert rids[0] not in rig.finish
            images[i % 2].arrive(piece)
            await rig.wait_tokens(rids[0], 15 * (i + 1) + 5)
            images[1 - i % 2].arrive(piece)
        await check_all(rig, rids, prompts, 5 * NEW)
        await happens(lambda: _alone(leader), "it goes on alone")
        await happens(lambda: lent_bytes(rig, 0) == lent_bytes(rig, 1) == 0, "the peer is needed no more")
        await p.check((61, 7), length=40)  # one of them is in the prefix tree
        if kv is KvWay.FETCH:
            await happens(lambda: leader.load and leader.load.kv_brought_tokens > 0, "KV was fetched")
