"""What is it worth that a prefill goes over a route in parts, so that its engines compute at the same time?

    python -m benchmarks.live.micro_batches [--rounds 9] [--tokens 256 512 700] [--models DIR]

A leader that runs the last four of a model's eight layers leads over an engine that has all and runs the first four. As
in real models the layers are matrix products above all. Prompts that nobody has seen, one at a time, in turns: as a
whole, in parts, and in the other engine alone; each is timed by the engines' clocks, from the client's asking until the
first token was made. Two stages that are alike take (m + 1) / 2m of the whole's time with m parts: a line ends with it.

Last result: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.demo_models import given_models
from benchmarks.live.switch import HEAD, LAYERS, SwitchBed
from prism.engine.handle import EngineHandle
from prism.policy.live.micro_batches import micro_batches
from prism.remote.orders import RouteStop
from tests.patience import happens

SPLIT: Final = 1 + LAYERS // 2
WAYS: Final = ("whole", "parts", "alone")


def make_dense_model(demo_models: Path, path: Path) -> Path:
    """demo-llama's tokenizer before eight layers of 9 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(demo_models / "demo-llama", path, ignore=shutil.ignore_patterns("*.safetensors", "*.json.index"))
    config = LlamaConfig.from_pretrained(demo_models / "demo-llama")
    config.update(
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        }
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


async def first_token_s(bed: SwitchBed, handle: EngineHandle, tokens: int) -> float:
    asked_s = time.time()
    stream = bed.ask(handle, tokens, 1)
    await happens(lambda: stream.over, "the answer")
    return stream.made_s[0] - asked_s


async def compare(bed: SwitchBed, leader: EngineHandle, whole: EngineHandle, rounds: int, tokens: int) -> None:
    path = str(bed.folder / "whole.layers")
    route = [RouteStop(path, 0, SPLIT), RouteStop("", SPLIT, HEAD + 1)]
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first warms up
        for way, times in took.items():
            if way != "alone":
                await leader.remote.set_route(route, whole_prefills=way == "whole")
            times.append(await first_token_s(bed, whole if way == "alone" else leader, tokens))
    whole_s, parts_s, alone_s = (statistics.median(times[1:]) for times in took.values())
    ratio = statistics.median(p / w for p, w in zip(took["parts"][1:], took["whole"][1:], strict=True))
    parts = len(micro_batches([tokens], 2))
    cells = f"{1e3 * whole_s:.0f} | {1e3 * parts_s:.0f} | {1e3 * alone_s:.0f} | {ratio:.2f}"
    print(f"| {tokens} | {parts} | {cells} | {(parts + 1) / (2 * parts):.2f} |", flush=True)


async def measure(models: Path, rounds: int, tokens: list[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-parts-") as folder:
        bed = SwitchBed(Path(folder), make_dense_model(models, Path(folder) / "dense"))
        await bed.pool.start()
        reading = asyncio.create_task(bed.read())
        try:
            whole, leader = await bed.activate(0), await bed.activate(1)
            bed.pool.memory[bed.devices[0]].offer(0)
            await whole.remote.serve_layers(Path(folder) / "whole.layers")
            print("| tokens | parts | whole, ms | in parts, ms | one engine, ms | parts / whole | ideal |")
            print("|---|---|---|---|---|---|---|")
            for count in tokens:
                await compare(bed, leader, whole, rounds, count)
        finally:
            reading.cancel()
            await bed.pool.close()
            bed.inbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefills over two engines, as a whole and in parts.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 700], help="of each prompt")
    parser.add_argument("--models", type=Path, help="folder of the demo models")
    options = parser.parse_args()
    asyncio.run(measure(given_models(options.models), options.rounds, options.tokens))


if __name__ == "__main__":
    main()
