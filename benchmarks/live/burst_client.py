"""A client that may run on another (virtual) host: has a model loaded so many times, sends a burst in that moment, and
watches both.

``python -m benchmarks.live.burst_client`` with a :class:`BurstJob` as JSON on its standard input prints a
:class:`BurstSeen`. All times are of the machine's clock (Unix), so that they can be laid beside logs.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec

LOOK_S: Final = 0.1
LIMIT_S: Final = 240.0
VOCABULARY: Final = 2000


class BurstJob(msgspec.Struct, kw_only=True):
    """What to do. ``instances`` 0: nothing is loaded."""

    url: str
    admin_key: str
    model: str
    instances: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    seed: str
    """Of the prompts: no request finds another's prefix."""
    wait_s: float = 0.05
    """Between the order to load and the burst, so that all instances come in one decision."""


class StreamSeen(msgspec.Struct):
    """One request: when its tokens came; none: it failed."""

    status: int
    tokens_s: list[float]


class BurstSeen(msgspec.Struct, kw_only=True):
    """What came of it."""

    sent_s: float
    """When the burst was sent."""
    loaded_s: float
    """When the order to load was answered; 0: there was none."""
    streams: list[StreamSeen]
    states: list[tuple[float, dict[str, tuple[str, int]]]]
    """By device: its instance's state and how many layers it has (-1: not said), whenever that changed."""


async def burst(job: BurstJob) -> BurstSeen:
    headers = {"Authorization": f"Bearer {job.admin_key}"}
    limits = httpx.Limits(max_connections=None)
    states: list[tuple[float, dict[str, tuple[str, int]]]] = []
    async with httpx.AsyncClient(base_url=job.url, timeout=LIMIT_S, limits=limits, headers=headers) as client:
        watching = asyncio.create_task(watch(client, job.model, states))
        loading = asyncio.create_task(load(client, job)) if job.instances else None
        await asyncio.sleep(job.wait_s)
        sent_s = time.time()
        streams = await asyncio.gather(*(ask(client, job, i) for i in range(job.requests)))
        loaded_s = await loading if loading else 0.0
        await asyncio.sleep(2 * LOOK_S)
        watching.cancel()
    return BurstSeen(sent_s=sent_s, loaded_s=loaded_s, streams=list(streams), states=states)


async def load(client: httpx.AsyncClient, job: BurstJob) -> float:
    reply = await client.post(f"/admin/models/{job.model}/load", json={"instances": job.instances})
    reply.raise_for_status()
    return time.time()


async def ask(client: httpx.AsyncClient, job: BurstJob, number: int) -> StreamSeen:
    drawn = random.Random(f"{job.seed} {number}")
    body = {
        "model": job.model,
        "prompt": [drawn.randrange(10, VOCABULARY) for _ in range(job.prompt_tokens)],
        "max_tokens": job.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    seen = StreamSeen(0, [])
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        seen.status = reply.status_code
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and "error" not in json.loads(line.removeprefix("data: ")):
                seen.tokens_s.append(time.time())
    return seen


async def watch(client: httpx.AsyncClient, model: str, states: list[tuple[float, dict[str, tuple[str, int]]]]) -> None:
    while True:
        shown = (await client.get(f"/admin/models/{model}")).json()
        now = dict(_states(shown))
        if not states or states[-1][1] != now:
            states.append((time.time(), now))
        await asyncio.sleep(LOOK_S)


def _states(shown: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    for replica in shown.get("replicas", ()):
        remote = replica.get("remote") or {}
        yield replica["devices"][0], (replica["state"], remote.get("held_layers", -1))


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=BurstJob)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(burst(job))))


if __name__ == "__main__":
    main()
