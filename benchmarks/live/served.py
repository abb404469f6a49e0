"""What does a burst on one of several models do to it and to the others, live, by how instances come?

    python -m benchmarks.live.served [--devices 4] [--rate 20] [--ways whole pair auto serverlessllm ideal]

A real ``prism-serve`` for each way (front door, Valkey, controller, agent, engines) on **paced** virtual devices: a
layer takes what :data:`PACE` declares, and weights come over a declared link in about :data:`LOAD_S`. **Times follow
from these declarations, they are no measurements of hardware.** One of eight models is asked once a second for 8 s,
then ``--rate`` times for 15 s; the seven others get two requests a second together all the time. A burst of 60 a second
is more than two cores can send and answer: 20 on devices of a third of the speed is the same to a scheduler.
The same requests at the same times each way: *whole* (stop-and-load), *pair*, *auto* (``live_scaling.mode``),
*serverlessllm* (the rival policy: a device to one instance at a time, weights in host memory), and *ideal*, which has
an instance on every device beforehand. In time is a first token within a second, good also at most 200 ms a token.
Every model is loaded twice before, so that schedulers have seen how long the declared link takes: the first time is
from files, which no declaration slows. *Device s* is the time of the burst's instances, loading with it, from its begin
to the last answer. *Cores* says how many of the machine's were busy, which must stay below what it has for the rest to
mean anything.

Last result: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.demo_models import kept_models
from benchmarks.slo.server import Server

MODEL: Final = "demo-llama"
BURST, OTHERS = "burst", tuple(f"calm-{i}" for i in range(7))
OTHERS_RPS: Final = 2.0
PACE: Final = {"layer": "5ms", "prefill_token": "300us", "decode_sequence": "100us"}
LOAD_S: Final = 1.5
TTFT_S, TPOT_S = 1.0, 0.2
WORDS: Final = 50
ANSWER: Final = 8
CALM_S, BURST_S = 8.0, 15.0
WAYS: Final = ("whole", "pair", "auto", "serverlessllm", "ideal")


@dataclass(slots=True)
class Asked:
    """One request."""

    model: str
    at_s: float
    """After the begin of the run."""
    ttft_s: float = float("inf")
    tpot_s: float = float("inf")

    @property
    def in_time(self) -> bool:
        return self.ttft_s <= TTFT_S

    @property
    def good(self) -> bool:
        return self.in_time and self.tpot_s <= TPOT_S


@dataclass(slots=True)
class Watched:
    """What was seen beside the requests."""

    device_s: float = 0.0
    most: int = 0
    cores: list[float] = field(default_factory=list)


def catalog(way: str, models: Path, devices: int) -> dict[str, Any]:
    nbytes = sum(file.stat().st_size for file in (models / MODEL).glob("*.safetensors"))
    links = {"host": f"{int(nbytes / LOAD_S)}B"}
    rival = {"name": "serverlessllm"}
    ours = {"min_residency": "500ms", "max_replicas": devices}
    return {
        "devices": [{"id": f"host:{i}", "memory": "96MiB", "links": links, "pace": PACE} for i in range(devices)],
        "defaults": {
            "slo": {"ttft": f"{TTFT_S:g}s", "tpot": f"{1000 * TPOT_S:g}ms"},
            "engine_args": {"dtype": "float32"},
        },
        "models": [{"name": name, "path": str(models / MODEL)} for name in (BURST, *OTHERS)],
        "policy": rival if way == "serverlessllm" else ours,
        "live_scaling": {"mode": way if way in ("pair", "auto") else "whole"},
        "engines": {"load_helpers": 1},
    }  # fmt: skip


def plan(rate: float) -> list[Asked]:
    """All requests by time: Poisson, alike in every way."""
    drawn = random.Random(11)
    found = []
    calm = ((CALM_S + BURST_S, OTHERS_RPS / len(OTHERS)),)
    for model, spans in ((BURST, ((CALM_S, 1.0), (BURST_S, rate))), *((model, calm) for model in OTHERS)):
        at_s, end_s = 0.0, 0.0
        for length_s, per_s in spans:
            end_s += length_s
            while (at_s := at_s + drawn.expovariate(per_s)) < end_s:
                found.append(Asked(model, at_s))
            at_s = end_s
    return sorted(found, key=lambda one: one.at_s)


async def ask(client: httpx.AsyncClient, asked: Asked, began_s: float, number: int) -> None:
    await asyncio.sleep(max(0.0, began_s + asked.at_s - time.perf_counter()))
    words = random.Random(number)
    prompt = " ".join(words.choice(("time", "day", "world", "model", "queue", "page", "device")) for _ in range(WORDS))
    body = {"model": asked.model, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0,
            "stream": True}  # fmt: skip
    sent_s, times_s = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())
    if times_s:
        asked.ttft_s = times_s[0] - sent_s
        asked.tpot_s = (times_s[-1] - times_s[0]) / (ANSWER - 1)


async def watch(server: Server, began_s: float, seen: Watched) -> None:
    last_s = time.perf_counter()
    psutil.cpu_percent()
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30.0) as client:
        while True:
            await asyncio.sleep(0.25)
            models = (await client.get("/admin/models")).json()["models"]
            count = sum(len(m["replicas"]) for m in models if m["name"] == BURST)
            now_s = time.perf_counter()
            if now_s - began_s > CALM_S:
                seen.device_s += count * (now_s - last_s)
                seen.most = max(seen.most, count)
                seen.cores.append(psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1))
            last_s = now_s


async def play(server: Server, requests: list[Asked]) -> Watched:
    seen, began_s = Watched(), time.perf_counter()
    watching = asyncio.create_task(watch(server, began_s, seen))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0, limits=limits) as client:
        await asyncio.gather(*(ask(client, one, began_s, i) for i, one in enumerate(requests)))
    watching.cancel()
    return seen


def run_way(way: str, devices: int, rate: float, folder: Path) -> str:
    file = folder / f"{way}.yaml"
    file.write_text(json.dumps(catalog(way, kept_models(), devices)))
    with Server(file) as server:
        for model in (BURST, *OTHERS):
            server.ask(model)
        server.settle(unload=True)
        for model in (BURST, *OTHERS):
            server.ask(model)
        if way == "ideal":
            load_everywhere(server, devices)
        requests = plan(rate)
        seen = asyncio.run(play(server, requests))
    return row(way, requests, seen)


def load_everywhere(server: Server, devices: int) -> None:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    url = f"{server.url}/admin/models/{BURST}/load"
    httpx.post(url, json={"instances": devices}, headers=headers, timeout=60.0).raise_for_status()
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        (model,) = (m for m in server.admin("models")["models"] if m["name"] == BURST)
        if sum(r["state"] == "ready" for r in model["replicas"]) == devices:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{BURST} is not on all devices after a minute\n{server.tail()}")


def row(way: str, requests: list[Asked], seen: Watched) -> str:
    burst = [one for one in requests if one.model == BURST and one.at_s >= CALM_S]
    others = [one for one in requests if one.model != BURST]
    first = sorted(one.ttft_s for one in burst)
    times = " | ".join(f"{s:.2f}" for s in (statistics.median(first), first[int(0.9 * len(first))], first[-1]))
    shares = [share([one.in_time for one in burst]), share([one.good for one in burst])]
    cores = f"{statistics.mean(seen.cores):.2f}, {max(seen.cores):.2f}"
    return (
        f"| {way} | {times} | {' | '.join(shares)} | {seen.device_s:.0f} | {seen.most} | "
        f"{share([one.in_time for one in others])} | {share([one.good for one in others])} | {cores} |"
    )


def share(met: list[bool]) -> str:
    return f"{100 * sum(met) / len(met):.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description="A burst on one of several models, live, on paced devices.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    count = sum(one.model == BURST and one.at_s >= CALM_S for one in plan(options.rate))
    print(f"{options.devices} devices, pace {PACE}, {count} requests in the burst", flush=True)
    print(
        "| way | p50, s | p90, s | last, s | TTFT met | goodput | device s | most | others' TTFT met | goodput ", end=""
    )
    print("| cores busy, mean, most |\n|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="prism-served-") as folder:
        for way in options.ways:
            print(run_way(way, options.devices, options.rate, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
