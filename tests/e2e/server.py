"""A real prism-serve in its own processes, and the reference it is compared with."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil
import redis

from prism.wire import keys
from tests import patience, warm
from tests.patience import PATIENCE_S, START_S, free_port

REPO = Path(__file__).resolve().parents[2]
DEMOS = ("demo-llama", "demo-qwen3", "demo-stablelm")
T = TypeVar("T")
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=PATIENCE_S)
"""For single requests, each over a connection of its own (a kept one may lead to a front door that is dead). Made once:
reading the system's certificates, of which nothing here has use, takes longer than a server takes to answer."""


def until(condition: Callable[[], T], what: str, *, limit_s: float = PATIENCE_S) -> T:
    """:func:`tests.patience.until`; a server that does not answer now may do so later."""
    return patience.until(condition, what, despite=(httpx.HTTPError, psutil.NoSuchProcess), limit_s=limit_s)


@dataclass
class Server:
    """One running server."""

    process: subprocess.Popen[bytes]
    url: str
    state: Path
    output: Path

    @cached_property
    def client(self) -> openai.OpenAI:
        """One synchronous client, closed with the server."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S)

    def async_client(self) -> openai.AsyncOpenAI:
        """A client for ``async with``: up to a thousand connections."""
        limits = httpx.Limits(max_connections=1000)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="any",
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=PATIENCE_S),
        )

    def admin(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An admin call: GET without a body, POST with one."""
        key = (self.state / "admin.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        answer = HTTP.request(method, f"{self.url}/admin/{path}", json=body, headers=headers)
        answer.raise_for_status()
        return answer.json()

    def pids(self, title: str) -> list[int]:
        """Processes of this server by the start of their title, such as ``prism: engine``."""
        return [p.pid for p in self.family() if _title(p.pid).startswith(title)]

    def running(self) -> dict[str, int]:
        """Pids of the supervised processes that run, by name, from the server's own status."""
        found = {p["name"]: int(p["pid"]) for p in self.admin("status")["processes"]}
        return {name: pid for name, pid in found.items() if pid > 1 and psutil.pid_exists(pid)}

    def named(self, name: str) -> int:
        """The pid of a supervised process; waits while it is being started."""
        return int(until(lambda: self.running().get(name), f"{name} running"))

    def kill(self, pid: int) -> None:
        assert pid > 1, "0 and negative numbers are groups of processes"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def victim(self, kind: str, chance: random.Random) -> int | None:
        """One process of a kind (``engine``, ``standby``, ``front`` or a supervised process by its name) that may
        die now; None where there is none, and while a front door is the last one: somebody must be there to ask."""
        if kind in ("engine", "standby"):
            found = self.pids(f"prism: {kind}")
            return chance.choice(found) if found else None
        try:
            running = self.running()
        except httpx.HTTPError:
            return None  # nobody is there to say it
        if kind != "front":
            return running.get(kind)
        fronts = [pid for name, pid in running.items() if name.startswith("front")]
        return chance.choice(fronts) if len(fronts) == 2 else None

    def replicas(self, model: str) -> list[dict[str, Any]]:
        models = {m["name"]: m for m in self.admin("models")["models"]}
        return [r for r in models[model]["replicas"] if r["state"] == "ready"]

    def queued(self) -> int:
        """Requests in any queue of the store."""
        with redis.Redis(unix_socket_path=str(self.state / "run" / "valkey.sock")) as store:
            devices = [keys.device_queue(d["id"]) for d in self.admin("devices")["devices"]]
            return int(store.hlen(keys.REQUESTS)) + sum(int(store.xlen(q)) for q in [keys.INACTIVE_QUEUE, *devices])

    def wait_unloaded(self, model: str) -> None:
        until(lambda: not self.replicas(model), f"{model} leaving")

    def family(self) -> list[psutil.Process]:
        """Every process of this server: its descendants, and those that have a file of its state directory open (an
        engine whose zygote died has another parent)."""
        return family(self.process.pid, self.state)

    def stop(self) -> None:
        """SIGTERM; afterwards no process is left."""
        if "client" in self.__dict__:
            self.client.close()
        family = self.family()
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive, f"left behind: {[(p.pid, _title(p.pid)) for p in alive]}"


def family(root: int, state: Path) -> list[psutil.Process]:
    """Process ``root``, its descendants, and whoever has a file of the folder ``state`` open."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(root)
        found = {p.pid: p for p in (first, *first.children(recursive=True))}
    for pid in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):
            if pid not in found and pid != os.getpid() and _opens(pid, state):
                found[pid] = psutil.Process(pid)
    return list(found.values())


def _opens(pid: int, folder: Path) -> bool:
    return any(str(fd.readlink()).startswith(f"{folder}/") for fd in Path(f"/proc/{pid}/fd").iterdir())


def _title(pid: int) -> str:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def start(
    folder: Path, catalog: dict[str, Any], *arguments: str, state: Path | None = None, from_warm: bool = True
) -> Server:
    """Starts prism-serve with ``catalog`` and waits until it answers. ``from_warm``: its zygote is forked from that of
    the tests (:mod:`tests.warm`); otherwise it imports SGLang itself, as an operator's does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "catalog.yaml"
    file.write_text(json.dumps(catalog))  # JSON is YAML
    port, output = free_port(), folder / "output.txt"
    state = state or folder / "state"
    command = [sys.executable, "-m", "prism.cli.main", "serve", str(file), "--port", str(port), "--state-dir"]
    with output.open("ab") as out:
        process = subprocess.Popen(
            [*command, str(state), *arguments],
            stdout=out,
            stderr=out,
            cwd=REPO,
            env=warm.environment() if from_warm else None,
        )
    server = Server(process, f"http://127.0.0.1:{port}", state, output)

    def ready() -> bool:
        assert process.poll() is None, f"prism-serve ended:\n{output.read_text()}"
        return HTTP.get(f"{server.url}/readiness").status_code == 200

    until(ready, "readiness", limit_s=START_S)
    return server


def catalog(models: Path, *, memory: str = "32MiB", count: int = 2, copies: int = 1, **model: Any) -> dict[str, Any]:
    """The demo models on ``count`` virtual devices; with ``copies`` each stands there several times under names such
    as ``demo-llama-1``."""
    names = [(f"{demo}-{i}" if i else demo, demo) for i in range(copies) for demo in DEMOS]
    defaults = {"slo": {"ttft": "2s", "tpot": "200ms"}, "engine_args": {"dtype": "float32"}, **model}
    return {
        "devices": [{"id": f"host:{i}", "memory": memory} for i in range(count)],
        "defaults": defaults,
        "models": [{"name": name, "path": str(models / demo)} for name, demo in names],
        "policy": {"min_residency": "500ms"},
        "server": {"front_workers": 2},
    }


@lru_cache(maxsize=8)
def _reference(path: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # the server needs the other cores
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


@lru_cache(maxsize=256)
def greedy(path: str, prompt: str, tokens: int) -> str:
    """What Hugging Face answers greedily in float32, end-of-sequence ignored: exactly ``tokens`` tokens, as text."""
    import torch

    model, tokenizer = _reference(path)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made: list[int] = []
    with torch.no_grad():
        out = model(ids, use_cache=True)
        for _ in range(tokens):
            made.append(int(out.logits[0, -1].argmax()))
            out = model(torch.tensor([[made[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return str(tokenizer.decode(made, skip_special_tokens=True))


def scores(path: str, prompt: str) -> list[float]:
    """Hugging Face's log-probability of each token of the prompt but the first, in float32."""
    import torch

    model, tokenizer = _reference(path)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    found: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def complete(client: openai.OpenAI, model: str, prompt: str, tokens: int) -> str:
    """A greedy completion of exactly ``tokens`` tokens, not streamed."""
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == tokens
    return answer.choices[0].text


async def stream(
    client: openai.AsyncOpenAI,
    model: str,
    prompt: str,
    tokens: int,
    on_chunk: Callable[[int], None] = lambda count: None,
) -> str:
    """The same, streamed; ``on_chunk`` hears how many pieces have come."""
    pieces: list[str] = []
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in answer:
        if chunk.choices:
            pieces.append(chunk.choices[0].text)
            on_chunk(len(pieces))
        elif chunk.usage is not None:
            assert chunk.usage.completion_tokens == tokens
    return "".join(pieces)


def prompts(count: int) -> Sequence[str]:
    """Prompts that differ in length and begin alike, so that prefixes are shared."""
    words = [
        "the",
        "request",
        "waits",
        "for",
        "a",
        "device",
        "while",
        "the",
        "other",
        "model",
        "answers",
        "quickly",
        "and",
        "the",
        "queue",
        "is",
        "short",
        "today",
    ]
    return [" ".join(words[: 3 + (i * 7) % 14]) + f" number {i}" for i in range(count)]
