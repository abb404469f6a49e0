"""How long does a request wait for its LoRA adapter to come in?

    python -m benchmarks.engine.adapters [--rounds 30] [--wide]

One engine with one slot. In turn: a request of the adapter in the slot, of one that the process keeps (copied into the
slot before the step), of one that nobody has used (read from its files first), and of the base right after an adapter
was told to leave. Times to the first token of prompts of eight tokens that no cache knows; what the others take longer
than the first is the switch. Goal: 20 ms. Beside other work the least of many and the engine's processor time say more.

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
from typing import Any, NamedTuple

import psutil

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


class Took(NamedTuple):
    """One request: its time, and the processor time of the engine."""

    wall_s: float
    engine_s: float


async def first_token(rig: rigs.Rig, handle: EngineHandle, folder: Path | None, seed: int) -> Took:
    request: Any = rigs.tokenized("", tuple((seed * 8 + i) % 1000 + 10 for i in range(8)), 1)
    if folder is not None:
        request.lora_id = AdapterRef(folder.name, str(folder), adapter_mark(folder)).id
    engine, start_s = psutil.Process(handle.pids[0]), time.perf_counter()
    before = engine.cpu_times()
    await rig.ask(handle, request)
    after = engine.cpu_times()
    return Took(time.perf_counter() - start_s, after.user + after.system - before.user - before.system)


async def measure(rig: rigs.Rig, base: Path, adapters: Path, rounds: int) -> None:
    folders = [make_adapter(base, adapters / f"a{i}", rank=RANK, seed=i) for i in range(rounds + 2)]
    size = adapter_facts(str(folders[0]), Path("/")).nbytes
    spec = replace(rig.spec_at(base), lora=LoraRoom(1, RANK, MODULES))
    handle = await rig.activate(spec, [rig.devices[0]])
    kinds: dict[str, list[Took]] = {name: [] for name in KINDS}
    for folder in folders[:2]:
        await first_token(rig, handle, folder, 0)
    for turn in range(rounds):
        asked: list[Path | None] = [folders[turn % 2], folders[turn % 2], folders[turn + 2], None]
        for at, (kind, wanted) in enumerate(zip(KINDS, asked, strict=True)):
            if wanted is None:
                handle.forget_adapter(folders[turn + 2].name)
            kinds[kind].append(await first_token(rig, handle, wanted, 4 * turn + at + 1))
    await handle.deactivate()
    print(f"adapters of rank {RANK} for every layer, {size / 2**20:.1f} MiB each, over {base.name}; {rounds} rounds")
    tell(kinds)


KINDS = ("kept by the process", "in its slot", "read from its files", "base, one told to leave")


def tell(kinds: dict[str, list[Took]]) -> None:
    """A line for each kind, against the adapter that is in its slot."""
    floor = [statistics.median(t.wall_s for t in kinds["in its slot"]), min(t.wall_s for t in kinds["in its slot"])]
    print(f"{'request of':26}{'p50':>9}{'p99':>9}{'least':>9}{'switch p50':>12}{'of least':>10}{'engine':>9}   (ms)")
    for kind, took in kinds.items():
        times = sorted(1000 * t.wall_s for t in took)
        p50, p99 = statistics.median(times), times[round(0.99 * (len(times) - 1))]
        engine = 1000 * statistics.mean(t.engine_s for t in took)
        more = p50 - 1000 * floor[0], times[0] - 1000 * floor[1]
        print(f"{kind:26}{p50:9.1f}{p99:9.1f}{times[0]:9.1f}{more[0]:12.1f}{more[1]:10.1f}{engine:9.1f}")


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
