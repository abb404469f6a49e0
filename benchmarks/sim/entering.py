"""What does a request that enters take from one that decodes, and does the simulator's calibration say the same?

On virtual devices: one model gives a long answer, and short requests of the same model enter every 200 ms. What each
takes is read within the long answer: its token gaps from the moment the request is sent until just after its last
token, beyond as many of the answer's undisturbed gaps (so that a machine whose speed drifts from answer to answer does
not matter). The calibration in ``--work`` (``python -m benchmarks.sim.validate`` makes it) says: a prefill step,
and what decode steps of two take more than those of one.

    python -m benchmarks.sim.entering --work DIR        # about a minute of a quiet machine

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from benchmarks.sim.validate import Bench, warm_up
from benchmarks.slo.server import exit_on_sigterm
from prism.sim.calibration import load_calibration
from tests.e2e.server import DEMOS, REPO

LONG_PROMPT, LONG_OUTPUT = 64, 300
EVERY_S = 0.2
ENTERING = ((16, 1), (64, 1), (256, 1), (16, 8))
"""Prompt and answer, in tokens."""
AFTER_S = 0.012
"""Behind its last token a request is let go of."""


@dataclass(frozen=True)
class Answer:
    """When it was asked for, and when its tokens came."""

    asked_s: float
    tokens_s: tuple[float, ...]


async def ask(port: int, model: str, prompt: str, output: int) -> Answer:
    """A streamed greedy completion of exactly ``output`` tokens."""
    body = json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json", "Connection: close"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    asked_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    tokens: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"text"' in line:
            tokens.append(time.perf_counter())
    writer.close()
    return Answer(asked_s, tuple(tokens))


async def beside(port: int, model: str, prompt: int, output: int) -> tuple[Answer, list[Answer]]:
    """A long answer and the requests that entered while it lasted."""
    long = asyncio.create_task(ask(port, model, "long" + " the" * LONG_PROMPT, LONG_OUTPUT))
    entering: list[asyncio.Task[Answer]] = []
    await asyncio.sleep(0.75 * EVERY_S)
    while not long.done():
        words = f"{len(entering)}" + " the" * prompt
        entering.append(asyncio.create_task(ask(port, model, words, output)))
        await asyncio.sleep(EVERY_S)
    return await long, [await each for each in entering]


def taken_s(long: Answer, entered: list[Answer]) -> list[float]:
    """Seconds that each of ``entered`` that ended within ``long`` took from it."""
    windows = [(a.asked_s, a.tokens_s[-1] + AFTER_S) for a in entered if a.tokens_s[-1] + AFTER_S < long.tokens_s[-1]]
    gaps = [((a + b) / 2, b - a) for a, b in pairwise(long.tokens_s)]
    undisturbed = [gap for at, gap in gaps if not any(begin <= at <= end for begin, end in windows)]
    usual_s = fmean(undisturbed)
    found = []
    for begin, end in windows:
        inside = [gap for at, gap in gaps if begin <= at <= end]
        found.append(sum(inside) - usual_s * len(inside))
    return found


def told_s(costs: dict[str, float], prompt: int, output: int) -> float:
    """The same by the calibration: see the module. The engine decodes already, so that ``switch_s`` is not in it."""
    prefill_s = costs["overhead_s"] + costs["sequence_s"] + costs["entry_s"]
    prefill_s += max(costs["gemm_token_s"] * prompt, costs["weights_s"])
    prefill_s += costs["attention_pair_s"] * prompt * prompt / 2
    second_s = costs["sequence_s"] + max(
        0.0, 2 * costs["gemm_token_s"] - max(costs["gemm_token_s"], costs["weights_s"])
    )
    return prefill_s + (output - 1) * second_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="folder of a validation, with its calibration")
    parser.add_argument("--models", type=Path, default=REPO / "demo-models")
    parser.add_argument("--model", default=DEMOS[0], choices=DEMOS)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    costs = load_calibration(args.work / "table.json").costs[args.model]
    bench = Bench(args.work.resolve(), args.models)
    found: dict[tuple[int, int], list[float]] = {kind: [] for kind in ENTERING}
    with bench.server("entering", bench.catalog("muxserve", dict.fromkeys(DEMOS, 1.0))) as server:
        warm_up(server, DEMOS, leave=False)
        port = int(server.url.rsplit(":", 1)[1])
        for _ in range(args.repeats):
            for prompt, output in ENTERING:
                found[prompt, output] += taken_s(*asyncio.run(beside(port, args.model, prompt, output)))
    print("| prompt | answer | requests | taken, ms: median | quarter to three quarters | the calibration, ms |")
    print("|---|---|---|---|---|---|")
    for (prompt, output), each in found.items():
        ms = sorted(1e3 * seconds for seconds in each)
        low, high = ms[len(ms) // 4], ms[3 * len(ms) // 4]
        told_ms = 1e3 * told_s(costs, prompt, output)
        print(f"| {prompt} | {output} | {len(ms)} | {median(ms):.1f} | {low:.1f} to {high:.1f} | {told_ms:.1f} |")


if __name__ == "__main__":
    exit_on_sigterm()
    main()
