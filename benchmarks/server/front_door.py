"""How many requests per second does one front-door worker carry, beside LiteLLM's proxy on the same machine?

    python -m benchmarks.server.front_door [--seconds 8] [--clients 32]

Both proxies are one process in front of a backend that costs nothing: Prism's worker in front of its store and a fake
node (everything but the engines is real: tokenizer, chat template, Redis streams, ZeroMQ, SGLang's OpenAI layer),
LiteLLM (PyPI, in its own environment, made on the first run) in front of a server with a canned answer. One after the
other, same load generator: ``clients`` connections, chat completions of 8 tokens, plain and streamed.

Last result: see docs/results/server.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.server.load import Outcome, prepared, run

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "bench"
KEY = "sk-benchmark"
BODY: dict[str, object] = {
    "model": "fast",
    "messages": [{"role": "user", "content": "Tell me something short about elephants."}],
    "max_tokens": 8,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One proxy, one kind of request."""

    outcome: Outcome
    cpu_s: float
    """CPU time of the proxy process during the run."""

    @property
    def cpu_ms(self) -> float:
        """Per request."""
        return 1000 * self.cpu_s / max(1, len(self.outcome.latencies_s))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(url, timeout=2).close()
            return
        time.sleep(0.2)
    raise TimeoutError(url)


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextlib.contextmanager
def prism(scratch: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of a front-door worker."""
    models = WORK / "models"
    if not (models / "demo-llama").is_dir():
        made = [sys.executable, "scripts/make_demo_models.py", str(models), "--only", "demo-llama"]
        subprocess.run(made, cwd=ROOT, check=True)
    catalog = scratch / "catalog.yaml"
    key = {"name": "bench", "key": KEY}
    model = {"name": "fast", "path": str(models / "demo-llama")}
    catalog.write_text(json.dumps({"devices": [{"id": "host:0", "memory": "1GiB"}], "models": [model], "keys": [key]}))
    port = free_port()
    command = [sys.executable, "-m", "prism.server", str(catalog), "--port", str(port), "--step-s", "0"]
    with process([*command, "--log-level", "warning"], scratch / "prism.log", OMP_NUM_THREADS="1") as started:
        wait_for(f"http://127.0.0.1:{port}/health", started)
        yield port, started.pid


def litellm_environment() -> Path:
    """The rival's executable; its environment is made once."""
    home = WORK / "litellm"
    if not (home / "bin" / "litellm").exists():
        uv = str(Path(sys.executable).with_name("uv"))
        print("installing LiteLLM into its own environment (once)", flush=True)
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(home)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(home / "bin/python"), "litellm[proxy]"], check=True)
    return home / "bin"


@contextlib.contextmanager
def litellm(scratch: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of LiteLLM's proxy, one worker."""
    binary = litellm_environment()
    port, backend = free_port(), free_port()
    entry = {"model": "openai/fast", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "fast", "litellm_params": entry}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"num_retries": 0, "set_verbose": False, "telemetry": False},
    }
    file = scratch / "litellm.yaml"
    file.write_text(json.dumps(config))
    canned = [sys.executable, str(Path(__file__).with_name("canned.py")), str(backend)]
    command = [str(binary / "litellm"), "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
    with (
        process(canned, scratch / "canned.log"),
        process([*command, "--num_workers", "1"], scratch / "litellm.log", **quiet) as started,
    ):
        wait_for(f"http://127.0.0.1:{port}/health/liveliness", started)
        yield port, _server_of(started.pid)


def _server_of(pid: int) -> int:
    """The process that serves: the command itself, or the busiest child of it."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return max(family, key=lambda p: sum(p.cpu_times()[:2])).pid


def measure(port: int, pid: int, body: dict[str, object], clients: int, seconds: float) -> Measured:
    request = prepared(port, "/v1/chat/completions", body, KEY)
    asyncio.run(run(port, request, clients, 2.0))  # warm
    proxy = psutil.Process(pid)
    before_s = sum(proxy.cpu_times()[:2])
    outcome = asyncio.run(run(port, request, clients, seconds))
    if outcome.failures or not outcome.latencies_s:
        raise RuntimeError(f"{outcome.failures} requests failed, {len(outcome.latencies_s)} succeeded")
    return Measured(outcome, sum(proxy.cpu_times()[:2]) - before_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--only", choices=["prism", "litellm"])
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, str], Measured] = {}
    for name, start in (("prism", prism), ("litellm", litellm)):
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="prism-") as scratch, start(Path(scratch)) as (port, pid):
                for kind, body in (("plain", BODY), ("stream", {**BODY, "stream": True})):
                    results[name, kind] = measure(port, pid, body, options.clients, options.seconds)
    report(results)


def report(results: dict[tuple[str, str], Measured]) -> None:
    print(f"{'':18}{'req/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms/req':>12}")
    for (name, kind), m in results.items():
        p50, p99 = 1000 * m.outcome.quantile_s(0.5), 1000 * m.outcome.quantile_s(0.99)
        print(f"{name + ' ' + kind:18}{m.outcome.per_s:8.0f}{p50:9.1f}{p99:9.1f}{m.cpu_ms:12.2f}")
    for kind in ("plain", "stream"):
        if ("prism", kind) in results and ("litellm", kind) in results:
            a, b = results["prism", kind], results["litellm", kind]
            faster = a.outcome.per_s / b.outcome.per_s
            shorter, less = b.outcome.quantile_s(0.99) / a.outcome.quantile_s(0.99), b.cpu_ms / a.cpu_ms
            print(f"{kind}: {faster:.1f}x the requests per second, p99 {shorter:.1f}x shorter, CPU {less:.1f}x less")


if __name__ == "__main__":
    main()
