"""A leader begins further batches while others are with its peers: every answer is what it would be without."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from prism.engine.handle import EngineHandle
from tests.engine.rig import Rig, prompt, tokenized
from tests.engine.test_remote_layers import NEW, SAMPLED, pair
from tests.patience import happens

pytestmark = pytest.mark.engine
CHUNK = 16
ALL = 3
"""Batches under way at the most."""


async def test_prompts_chunks_and_decoding_are_under_way_together(rig: Rig) -> None:
    """Prompts of several chunks, one prefix in two of them, and requests that decode meanwhile."""
    async with pair(rig, "demo-llama", chunked_prefill_size=CHUNK) as p:
        head = p.pieces - 1
        for route in (p.over(p.path, 2, head), p.over(p.path, 1, 3)):
            await p.leader.remote.set_route(route)
            long = prompt(50, 3 * CHUNK)
            first = rig.submit(p.leader, tokenized("", long, 4 * NEW))
            await rig.wait_tokens(first, 2)
            await p.check((51, 52, 53, 54, 55), length=CHUNK - 3)
            both = [*long, *prompt(56, 2 * CHUNK)], [*long, *prompt(57, CHUNK)]
            rids = [rig.submit(p.leader, tokenized("", q, NEW)) for q in both]
            for rid, q in zip(rids, both, strict=True):
                assert await rig.answer(rid) == rig.reference(p.name, q, NEW)
            assert await rig.answer(first) == rig.reference(p.name, long, 4 * NEW)
        await happens(lambda: _most(p.leader) == ALL, "several batches were under way")
        requests: list[dict[str, Any]] = [SAMPLED, {"logprobs": True}, {"frequency_penalty": 0.7, "temperature": 0}]
        asked = [(request, prompt(58 + i, 2 * CHUNK + 5)) for i, request in enumerate(requests)]
        led, alone = (
            [rig.submit(engine, tokenized("", q, NEW, **request)) for request, q in asked]
            for engine in (p.leader, p.whole)
        )
        for one, other in zip(led, alone, strict=True):
            assert await rig.answer(one) == await rig.answer(other)


async def test_a_peer_stopped_then_killed_with_several_batches(rig: Rig) -> None:
    """They wait for it; one of their requests is aborted; and in the end all begin again over the next route."""
    async with pair(rig, "demo-llama", chunked_prefill_size=CHUNK) as p:
        await p.leader.remote.set_route(p.over(p.path, 2, p.pieces - 1), p.alone())
        for end in (signal.SIGCONT, signal.SIGKILL):
            running = rig.submit(p.leader, tokenized("", prompt(60), 4 * NEW))
            await rig.wait_tokens(running, 2)
            os.kill(p.whole.pids[0], signal.SIGSTOP)
            prompts = [prompt(61 + i, CHUNK - 4 + 9 * i) for i in range(5)]
            rids = [rig.submit(p.leader, tokenized("", q, NEW)) for q in prompts]
            await asyncio.sleep(0.5)  # by now some are with the peer, as a rule: an engine that waits tells nothing
            p.leader.abort(rids[1])
            await asyncio.sleep(0.1)
            os.kill(p.whole.pids[0], end)
            for i, (rid, q) in enumerate(zip(rids, prompts, strict=True)):
                answer = await rig.answer(rid)
                assert rig.finish[rid]["type"] == ("abort" if i == 1 else "length")
                assert i == 1 or answer == rig.reference(p.name, q, NEW)
            assert await rig.answer(running) == rig.reference(p.name, prompt(60), 4 * NEW)
            if end is signal.SIGCONT:
                await happens(lambda: _most(p.leader) == ALL, "several batches were under way")
                assert p.leader.load and p.leader.load.remote and p.leader.load.remote.ahead > 1
        told = await happens(lambda: p.leader.load, "how it stands")
        await happens(lambda: _alone(p.leader) and not told.queued, "it goes on alone")
        await p.check((1, 66))


@pytest.mark.parametrize("name", ["demo-llama", "demo-qwen3"])
async def test_what_waits_for_a_stopped_peer_is_run_ahead(rig: Rig, name: str) -> None:
    """The peer is left with less of it, or, for prompts whose beginning it knows, with what it was asked; what decodes
    afterwards finds its KV there."""
    async with pair(rig, name, chunked_prefill_size=4 * CHUNK) as p:
        await p.leader.remote.set_route(p.over(p.path, 1, p.pieces - 1), p.alone())
        for turn in range(50):
            os.kill(p.whole.pids[0], signal.SIGSTOP)
            asked = [prompt(70 + i, CHUNK) + prompt(100 + 5 * turn + i, CHUNK) for i in range(4)]
            rids = [rig.submit(p.leader, tokenized("", q, NEW)) for q in asked]
            await asyncio.sleep(0.2 * (turn + 1))  # until then they are with the peer, sooner or later
            os.kill(p.whole.pids[0], signal.SIGCONT)
            for rid, q in zip(rids, asked, strict=True):
                assert await rig.answer(rid) == rig.reference(p.name, q, NEW)
            if p.leader.load and p.leader.load.remote and p.leader.load.remote.run_ahead:
                return
        raise AssertionError("nothing was run ahead")


def _most(engine: EngineHandle) -> int:
    return engine.load.remote.most if engine.load and engine.load.remote else 0


def _alone(engine: EngineHandle) -> bool:
    return bool(engine.load and engine.load.remote and engine.load.remote.alone)
