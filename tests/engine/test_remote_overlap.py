"""Engines that prepare a step while the one before is computed lead over others and run layers for them: they stop
preparing while their route leads elsewhere. Streams of the CPU do nothing: it is the order of things that is tested."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism.remote.orders import KvWay
from tests.engine.rig import Rig, opened, prompt, tokenized
from tests.engine.test_remote_layers import NEW, SAMPLED, _alone, lent_bytes, pair
from tests.patience import happens

pytestmark = pytest.mark.engine


@pytest.fixture
async def ahead(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """As ``rig``, with overlap."""
    async with opened(zygote, demo_models, overlap=True) as rig:
        yield rig


@pytest.mark.slow
async def test_a_route_beside_overlapped_steps(ahead: Rig) -> None:
    """Set and taken back while requests run, with requests of the peer's own; then it grows, and the peer is killed."""
    async with pair(ahead, "demo-llama", chunked_prefill_size=32) as p:
        await p.leader.remote.serve_layers(ahead.folder / "leader.layers")
        prompts = [prompt(50 + i, 40 + 9 * i) for i in range(4)]
        rids = [ahead.submit(e, tokenized("", q, 6 * NEW)) for e in (p.leader, p.whole) for q in prompts]
        await asyncio.gather(*(ahead.wait_tokens(rid, 3) for rid in rids))
        await p.leader.remote.set_route(p.over(p.path, 2, 5), p.alone())
        await ahead.wait_tokens(rids[0], 2 * NEW)
        assert lent_bytes(ahead, 0) > 0
        await p.leader.remote.grow_route(KvWay.FETCH)
        await happens(lambda: _alone(p.leader), "it goes on alone")
        await ahead.wait_tokens(rids[0], 3 * NEW)
        await p.leader.remote.set_route(p.over(p.path, 1, 4), p.alone())
        await ahead.wait_tokens(rids[0], 4 * NEW)
        for rid, q in zip(rids[4:], prompts, strict=True):
            assert await ahead.answer(rid) == ahead.reference(p.name, q, 6 * NEW)
        for sampling in (SAMPLED, {"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"regex": "[a-z ]{40,60}"}):
            both = [ahead.submit(e, tokenized("", prompt(9, 70), NEW, **sampling)) for e in (p.leader, p.whole)]
            assert await ahead.answer(both[0]) == await ahead.answer(both[1])
        more = ahead.submit(p.leader, tokenized("", prompt(3, 50), 4 * NEW))
        await ahead.wait_tokens(more, 3)
        os.kill(p.whole.pids[0], signal.SIGKILL)
        for rid, q in zip(rids[:4], prompts, strict=True):
            assert await ahead.answer(rid) == ahead.reference(p.name, q, 6 * NEW)
        assert await ahead.answer(more) == ahead.reference(p.name, prompt(3, 50), 4 * NEW)
        await p.check((1, 2))
