"""Question: what does Prism's whole path (HTTP, Redis, schedulers, worker) cost against SGLang's own server?

    python -m benchmarks.e2e.added_latency [--requests 60]

Both servers run the same demo model on this machine with the same engine settings; requests alternate between them one
by one, so that both see the same noise. Sequential streams give the median time to the first token and the token rate
of one stream; a round of four at once gives the rate under a small load. Goal: median TTFT + 5 ms, rate 95%.
Results in docs/results/e2e.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import openai

from benchmarks.demo_models import kept_models
from prism.engine import cuda_stub
from prism.engine.boot import HOST_ENVIRONMENT
from prism.engine.sglang_args import HOST
from tests.e2e.server import DEMOS, catalog, start
from tests.patience import free_port

TOKENS = 64


@dataclass
class Side:
    """One server's numbers."""

    name: str
    client: openai.AsyncOpenAI
    ttft_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    """Tokens/s after the first, one stream at a time."""
    busy_rate: list[float] = field(default_factory=list)
    """Tokens/s of four streams together."""

    async def one(self, prompt: str) -> tuple[float, float]:
        """Seconds to the first token and from there to the last."""
        began = time.perf_counter()
        first = last = 0.0
        answer = await self.client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.choices:
                last = time.perf_counter()
                first = first or last
        return first - began, last - first

    async def alone(self, prompt: str) -> None:
        ttft, rest = await self.one(prompt)
        self.ttft_ms.append(ttft * 1000)
        self.rate.append((TOKENS - 1) / rest)

    async def four(self, prompt: str) -> None:
        began = time.perf_counter()
        await asyncio.gather(*(self.one(f"{prompt} {i}") for i in range(4)))
        self.busy_rate.append(4 * TOKENS / (time.perf_counter() - began))

    def summary(self) -> dict[str, float]:
        return {
            "ttft_ms_p50": round(median(self.ttft_ms), 2),
            "tokens_per_s_one": round(median(self.rate), 1),
            "tokens_per_s_four": round(median(self.busy_rate), 1),
        }


def start_sglang(model: Path, port: int, log: Path, *more: str) -> subprocess.Popen[bytes]:
    """SGLang's own server, with the engine settings Prism uses on virtual devices and ``more`` arguments."""
    environment = {**os.environ, **HOST_ENVIRONMENT, "SGLANG_PLUGINS": "none"}
    if not cuda_stub.driver_present():
        cuda_stub.build(cuda_stub.stub_path())
        environment["LD_PRELOAD"] = str(cuda_stub.stub_path())
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "demo"]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph"]
    command += ["--attention-backend", str(HOST["attention_backend"]), "--sleep-on-idle"]
    command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "8192", "--log-level", "warning"]
    command += ["--skip-server-warmup", *more]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1800):
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        if process.poll() is not None:
            sys.exit(f"SGLang's server ended:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    sys.exit("SGLang's server did not start")


async def measure(urls: dict[str, str], requests: int) -> list[Side]:
    sides = [Side(n, openai.AsyncOpenAI(base_url=f"{u}/v1", api_key="x", max_retries=0)) for n, u in urls.items()]
    for side in sides:
        for i in range(5):
            await side.one(f"warm up {i}")
    for i in range(requests):
        for side in sides if i % 2 else sides[::-1]:
            await side.alone(f"request number {i} asks for a few words about queues and devices")
    for i in range(max(4, requests // 6)):
        for side in sides if i % 2 else sides[::-1]:
            await side.four(f"round {i} of four")
    for side in sides:
        await side.client.close()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    options = parser.parse_args()
    models = kept_models()
    config = catalog(models, memory="256MiB", count=1)
    config["models"] = [{"name": "demo", "path": str(models / DEMOS[1]), "pin": True}]
    config["server"] = {"front_workers": 1}
    with tempfile.TemporaryDirectory(prefix="prism-lat-") as name:
        folder, port = Path(name), free_port()
        prism = start(folder, config)
        sglang = start_sglang(models / DEMOS[1], port, folder / "sglang.log")
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, sglang, folder / "sglang.log")
            sides = asyncio.run(measure({"prism": prism.url, "sglang": url}, options.requests))
        finally:
            sglang.terminate()
            sglang.wait(30)
            prism.stop()
    numbers = {side.name: side.summary() for side in sides}
    ours, theirs = numbers["prism"], numbers["sglang"]
    numbers["prism over sglang"] = {
        "ttft_ms_added": round(ours["ttft_ms_p50"] - theirs["ttft_ms_p50"], 2),
        "rate_ratio_one": round(ours["tokens_per_s_one"] / theirs["tokens_per_s_one"], 3),
        "rate_ratio_four": round(ours["tokens_per_s_four"] / theirs["tokens_per_s_four"], 3),
    }
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
