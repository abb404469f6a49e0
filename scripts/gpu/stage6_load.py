"""Stage 6: what Prism's engines do per second, with overlap scheduling and without, against SGLang as it comes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from prism.engine.handle import EngineHandle
from scripts.gpu.bench_rig import OUTER, Bench, bench, model
from scripts.gpu.load import DRY_LOAD, GPU_LOAD, Answer, OnFirst, Outcome, measure
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT, Item, Stage, run_stage
from tests.engine.rig import tokenized


def prism_answer(at: Bench, handle: EngineHandle) -> Answer:
    async def answer(prompt: Sequence[int], new_tokens: int, on_first: OnFirst) -> int:
        rid = at.rig.submit(handle, tokenized("", prompt, new_tokens))
        await at.rig.wait_tokens(rid, 1)
        on_first()
        return len(await at.rig.answer(rid))

    return answer


def stock(run: Run) -> None:
    """SGLang's own engine, its defaults."""
    run.needs_gpu()
    load = msgspec.json.encode(GPU_LOAD)
    command = [sys.executable, "-m", "scripts.gpu.stock", str(model(run, "8b"))]
    done = subprocess.run(command, cwd=ROOT, input=load, capture_output=True, env=OUTER, check=False)
    words = done.stderr.decode(errors="replace")[-300:]
    run.check(done.returncode == 0, f"SGLang by itself ended with {done.returncode}: {words}")
    if done.returncode == 0:
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Outcome)
        (run.scratch / "stock-outcome.json").write_bytes(msgspec.json.encode(found))
        note(run, found, None)


def ours(run: Run) -> None:
    """Prism's engine as it is set today."""
    asyncio.run(_ours(run))
    run.needs_gpu()


def in_turns(run: Run) -> None:
    """Prism's engine without SGLang's overlap scheduling, which is on by default."""
    run.needs_gpu()
    asyncio.run(_ours(run, overlap=False))


async def _ours(run: Run, **options: Any) -> None:
    async with bench(run, **options) as at:
        handle, _ = await at.activate(model(run, "8b"))
        found = await measure(DRY_LOAD if run.dry else GPU_LOAD, prism_answer(at, handle))
        await handle.deactivate()
    other = run.scratch / "stock-outcome.json"
    note(run, found, msgspec.json.decode(other.read_bytes(), type=Outcome) if other.exists() else None)


def note(run: Run, found: Outcome, other: Outcome | None) -> None:
    """Readings of ``found``; against ``other`` at equal load the goal is 97% of its throughput."""
    rate = None if other is None else other.tokens_per_s
    run.reading("throughput", found.tokens_per_s, "tokens/s", limit=rate, less_is_better=False)
    run.reading("time to first token p50", found.ttft_p50_s, "s", limit=None if other is None else other.ttft_p50_s)
    run.reading("time to first token p99", found.ttft_p99_s, "s", limit=None if other is None else other.ttft_p99_s)
    if rate is None:
        run.remark("nothing to compare with")
        return
    ratio = found.tokens_per_s / rate
    run.reading("throughput over stock SGLang", ratio, "x", goal=0.97, is_estimate=False, less_is_better=False)
    run.remark("the goal of 0.97 is " + ("met" if ratio >= 0.97 else "missed"))


STAGE = Stage(
    "scripts.gpu.stage6_load",
    __doc__,
    (
        Item("stock", stock, 200),
        Item("ours", ours, 150),
        Item("in_turns", in_turns, 150),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
