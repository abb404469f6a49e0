"""An item of stage 5: one engine leads its requests over another one of the same GPU, as both are by default: steps are
prepared ahead and decoding has graphs, until the route leads elsewhere and again when the engine is alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Final

from prism.engine.handle import EngineHandle
from prism.remote.orders import KvWay, RouteStop
from scripts.gpu.bench_rig import Bench, bench, model
from scripts.gpu.run import Run
from tests.engine.rig import prompt, tokenized

PROMPTS: Final = 4
SURE: Final = 4
"""Tokens that must agree: later ones may differ where two are as likely and the kernels are others."""


def route(run: Run) -> None:
    """Tokens over a route, with requests of the peer's own; then the route grows until the engine is alone, and at last
    a peer is killed amid answers."""
    asyncio.run(_route(run))
    run.needs_gpu()


async def _route(run: Run) -> None:
    new = 16 if run.dry else 64
    async with bench(run, overlap=True) as at:
        folder = model(run, "0.6b")
        first, _ = await at.activate(folder)
        await first.deactivate()  # it leaves an image
        leader, _ = await at.activate(folder)
        peer, _ = await at.activate(folder)
        head = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"]) + 1
        path = at.rig.folder / "peer.layers"
        at.account.offer(0)
        await peer.remote.serve_layers(path)
        over = [RouteStop("", 0, 2), RouteStop(str(path), 2, head), RouteStop("", head, head + 1)]
        alone = [RouteStop("", 0, head + 1)]
        expected = await _answers(run, at, leader, new, "alone")
        await leader.remote.set_route(over, alone)
        _compare(run, expected, await _answers(run, at, leader, new, "over a route", beside=peer))
        await leader.remote.grow_route(KvWay.FETCH)
        _compare(run, expected, await _answers(run, at, leader, new, "alone again"))
        await leader.remote.set_route(over, alone)
        rids = [at.rig.submit(leader, tokenized("", prompt(i), new)) for i in range(PROMPTS)]
        await at.rig.wait_tokens(rids[0], 2)
        os.kill(peer.pids[0], signal.SIGKILL)
        _compare(run, expected, [await at.rig.answer(rid) for rid in rids])
        await leader.deactivate()
        at.account.reap()
        run.check(not (problems := at.account.audit().problems), f"the account and the driver disagree: {problems}")


async def _answers(
    run: Run, at: Bench, engine: EngineHandle, new: int, how: str, beside: EngineHandle | None = None
) -> list[list[int]]:
    start_s = time.perf_counter()
    asked = [at.generate(engine, prompt(i), new) for i in range(PROMPTS)]
    own = [] if beside is None else [at.generate(beside, prompt(i), new) for i in range(PROMPTS)]
    found = await asyncio.gather(*asked, *own)
    run.reading(f"tokens/s {how}", len(found) * new / (time.perf_counter() - start_s), "1/s", less_is_better=False)
    return found[:PROMPTS]


def _compare(run: Run, expected: list[list[int]], found: list[list[int]]) -> None:
    pairs = list(zip(expected, found, strict=True))
    run.check(all(a[:SURE] == b[:SURE] for a, b in pairs), f"other tokens than alone: {pairs}"[:400])
    run.remark(f"{sum(a == b for a, b in pairs)} of {len(pairs)} answers agree to the end")
