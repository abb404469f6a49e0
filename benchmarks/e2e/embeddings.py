"""Question: how many texts per second does Prism embed, against SGLang's own server?

    python -m benchmarks.e2e.embeddings [--rounds 8]

Both servers run the same embedding model (random weights, made here) on this machine with the same engine settings and
one compute thread each; rounds alternate between them, so that both see the same noise. A round is some requests of
many different texts each, from a few clients. The vectors of both are compared. Goal: 95% of SGLang's rate. Beside
other work on the machine rates say little; the processor time that a server's processes take for a text says more.
Results in docs/results/e2e.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import openai
import psutil

from benchmarks.demo_models import kept_models
from benchmarks.e2e.added_latency import start_sglang, wait_for
from tests.e2e.server import DEMOS, catalog, start
from tests.patience import free_port

CLIENTS = 4
TEXTS = 32
LENGTH = 40
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 4096,
}
POOLING = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@dataclass
class EmbeddingSide:
    """One server's numbers."""

    name: str
    client: openai.AsyncOpenAI
    root: psutil.Process
    rate: list[float] = field(default_factory=list)
    """Texts per second, by round."""
    cpu_us: Counter[str] = field(default_factory=Counter)
    """Processor time of the rounds by process: what is left when other work shares the processors."""
    texts: int = 0

    async def embed(self, texts: list[str]) -> list[list[float]]:
        made = await self.client.embeddings.create(model="demo", input=texts, encoding_format="float")
        return [row.embedding for row in made.data]

    async def round(self, batches: list[list[str]]) -> None:
        began_s, before = time.perf_counter(), self.used()
        waiting = iter(batches)

        async def client() -> None:
            for texts in waiting:
                await self.embed(texts)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        self.rate.append(sum(map(len, batches)) / (time.perf_counter() - began_s))
        self.cpu_us += self.used() - before
        self.texts += sum(map(len, batches))

    def used(self) -> Counter[str]:
        """Microseconds of processor time of the server's processes so far, by the first words of their titles."""
        found: Counter[str] = Counter()
        for process in (self.root, *self.root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[_title(process.cmdline())] += round(1e6 * (times.user + times.system))
        return found

    def cpu_ms(self) -> dict[str, float]:
        """Milliseconds of processor time for a text."""
        return {title: round(us / 1000 / self.texts, 3) for title, us in self.cpu_us.most_common(6)}


def _title(words: list[str]) -> str:
    """``prism: engine w3-1 host:0`` -> ``prism: engine``; commands by their module."""
    line = " ".join(words)
    if " -m " in line:
        return line.partition(" -m ")[2].split()[0]
    return (
        " ".join(line.split()[:2]) if line.startswith("prism:") else line.split()[0].rpartition("/")[2] if line else ""
    )


def make_model(folder: Path, like: Path) -> None:
    """An embedding model as sentence-transformers stores one."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(**SIZE, bos_token_id=0, eos_token_id=1, dtype="float32")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps(POOLING))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copy(like / name, folder)


def batches(seed: int, count: int) -> list[list[str]]:
    """Texts that no other batch has, so that no cache answers."""
    draw = random.Random(seed)
    return [[" ".join(draw.choices(WORDS, k=LENGTH)) + f" {seed}.{i}.{j}" for j in range(TEXTS)] for i in range(count)]


async def measure(servers: dict[str, tuple[str, int]], rounds: int, requests: int) -> tuple[list[EmbeddingSide], float]:
    """Both sides' numbers, and the largest difference between their vectors. ``servers``: address and process id."""
    clients = {
        name: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) for name, (url, _) in servers.items()
    }
    sides = [EmbeddingSide(name, client, psutil.Process(servers[name][1])) for name, client in clients.items()]
    same = [np.asarray(await side.embed(batches(0, 1)[0])) for side in sides]
    for side in sides:
        await side.round(batches(1, requests))
        side.rate.clear()
        side.cpu_us.clear()
        side.texts = 0
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            await side.round(batches(2 + number, requests))
    for client in clients.values():
        await client.close()
    return sides, float(np.abs(same[0] - same[1]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=12, help="of a round")
    options = parser.parse_args()
    demos = kept_models()
    config = catalog(demos, memory="512MiB", count=1)
    config["server"] = {"front_workers": 1}
    with tempfile.TemporaryDirectory(prefix="prism-emb-") as name:
        folder, port = Path(name), free_port()
        model = folder / "model"
        make_model(model, demos / DEMOS[1])
        config["models"] = [{"name": "demo", "path": str(model), "pin": True}]
        prism = start(folder / "prism", config)
        sglang = start_sglang(model, port, folder / "sglang.log", "--is-embedding", "--disable-radix-cache")
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, sglang, folder / "sglang.log")
            sides, apart = asyncio.run(
                measure(
                    {"prism": (prism.url, prism.process.pid), "sglang": (url, sglang.pid)},
                    options.rounds,
                    options.requests,
                )
            )
        finally:
            sglang.terminate()
            sglang.wait(30)
            prism.stop()
    report(sides, apart)


def report(sides: list[EmbeddingSide], apart: float) -> None:
    ratios = [ours / theirs for ours, theirs in zip(sides[0].rate, sides[1].rate, strict=True)]
    numbers = {
        side.name: {"texts_per_s_p50": round(median(side.rate), 1), "cpu_ms_per_text": side.cpu_ms()} for side in sides
    }
    per_text = [sum(side.cpu_us.values()) / side.texts for side in sides]
    shown = {
        "ratio_p50": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "sglang's processor time over prism's": round(per_text[1] / per_text[0], 3),
    }
    print(json.dumps({**numbers, "prism over sglang": shown, "vectors_apart": apart}, indent=1))


if __name__ == "__main__":
    main()
