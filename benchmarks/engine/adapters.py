"""How long does a request wait for its LoRA adapter to come in?

    python -m benchmarks.engine.adapters [--rounds 30] [--wide]

One engine with one slot. In turn: a request of the adapter in the slot, of one that the process keeps (copied into the
slot before the step), and of one that nobody has used (read from its files first). Times to the first token of prompts
of eight tokens that no cache knows; what the last two take longer than the first is the switch. Goal: 20 ms.

``--wide``: over a Llama of 16 layers of width 1024 instead of demo-llama.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prism.config.adapters import adapter_facts, adapter_mark
from prism.core.specs import LoraRoom
from prism.engine.handle import EngineHandle
from prism.wire.adapters import AdapterRef
from scripts.make_demo_adapter import make_adapter
from tests.engine import rig as rigs

ROOT = Path(__file__).resolve().parents[2]
RANK = 16
MODULES = ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")


def make_wide(folder: Path) -> Path:
    """A Llama with random weights, without a tokenizer (engines need none)."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


async def first_token_s(rig: rigs.Rig, handle: EngineHandle, folder: Path, seed: int) -> float:
    request: Any = rigs.tokenized("", tuple((seed * 8 + i) % 1000 + 10 for i in range(8)), 1)
    request.lora_id = AdapterRef(folder.name, str(folder), adapter_mark(folder)).id
    start_s = time.perf_counter()
    await rig.ask(handle, request)
    return time.perf_counter() - start_s


async def measure(rig: rigs.Rig, base: Path, adapters: Path, rounds: int) -> None:
    folders = [make_adapter(base, adapters / f"a{i}", rank=RANK, seed=i) for i in range(rounds + 2)]
    size = adapter_facts(str(folders[0]), Path("/")).nbytes
    spec = replace(rig.spec_at(base), lora=LoraRoom(1, RANK, MODULES))
    handle = await rig.activate(spec, [rig.devices[0]])
    kinds: dict[str, list[float]] = {"in its slot": [], "kept by the process": [], "read from its files": []}
    for folder in folders[:2]:
        await first_token_s(rig, handle, folder, 0)
    for turn in range(rounds):
        seed = 3 * turn + 1
        kinds["kept by the process"].append(await first_token_s(rig, handle, folders[turn % 2], seed))
        kinds["in its slot"].append(await first_token_s(rig, handle, folders[turn % 2], seed + 1))
        kinds["read from its files"].append(await first_token_s(rig, handle, folders[turn + 2], seed + 2))
    await handle.deactivate()
    floor_s = statistics.median(kinds["in its slot"])
    print(f"adapters of rank {RANK} for every layer, {size / 2**20:.1f} MiB each, over {base.name}; {rounds} rounds")
    print(f"{'adapter':22}{'first token p50':>17}{'p95':>10}{'switch p50':>13}")
    for kind, times in kinds.items():
        ordered = sorted(times)
        p50, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
        print(f"{kind:22}{1000 * p50:14.1f} ms{1000 * p95:7.1f} ms{1000 * (p50 - floor_s):10.1f} ms")


async def run(models: Path, zygote: Path, rounds: int, wide: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        if wide:
            rigs.DEVICE_BYTES = 2 << 30
        base = make_wide(Path(folder) / "wide") if wide else models / "demo-llama"
        rig = rigs.Rig(Path(folder), models, zygote)
        await rig.start()
        try:
            await measure(rig, base, Path(folder) / "adapters", rounds)
        finally:
            await rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of switching between LoRA adapters.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", type=Path, default=ROOT / "demo-models")
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    if not options.wide and not (options.models / "demo-llama").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts/make_demo_models.py"), str(options.models)], check=True)
    with tempfile.TemporaryDirectory(prefix="prism-z-") as folder:
        socket = Path(folder) / "zygote.sock"
        command = [sys.executable, "-m", "prism.engine.zygote", "--socket", str(socket)]
        zygote = subprocess.Popen(command, cwd=ROOT)
        try:
            asyncio.run(run(options.models, socket, options.rounds, options.wide))
        finally:
            zygote.kill()
            zygote.wait()


if __name__ == "__main__":
    main()
