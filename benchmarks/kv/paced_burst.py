"""Figure 8 with steps that cost what a GPU's do: what does taking turns do to a burst on paced devices?

    python -m benchmarks.kv.paced_burst [--rate 0.6] [--before 10] [--burst-s 60] [--rounds 1]

As :mod:`benchmarks.kv.burst`, but devices play two H100s that run Llama-70B: a step takes what the simulator's model of
them says (:func:`declared_pace`), 33 ms and little for each request, so that a minute's burst is a minute. **Times are
declared, not measured**; the engine's real compute, which is small beside them, is in them where it exceeds its turn
(``beyond``). The model has one layer with the KV bytes of demo-llama's four, so that a step of all that fit computes
for less than a quarter of what is declared. All ways run at the same time on the same requests, each on a device of its
own beside one that lends: none has a quieter machine than another. ``--rate`` is the stable rate; without it, as in
:mod:`benchmarks.kv.burst_model`, the largest of some (:data:`STEADY_REQUESTS` evenly spaced requests of each, at the
same time on a device each) at which first come first served costs requests a second each; the rest as there.
Prints how busy the machine was, too.

Last result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.demo_models import given_models, pool_spec
from benchmarks.kv.burst import (
    DEVICE_BYTES,
    HOST_BYTES_S,
    KV_PAGES,
    NAME,
    PEER_TIMES,
    WAYS,
    BurstBed,
    arrivals,
    open_bed,
    row,
)
from prism.core.ids import DeviceId, Generation
from prism.core.instances import InstanceKey, whole_model
from prism.core.pace import DevicePace
from prism.core.specs import Scheduling
from prism.engine.handle import EngineHandle
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.sim.gpus import gpu
from prism.sim.models import known_spec
from prism.sim.roofline import step_cost

PLAYED: Final = "meta-llama/Llama-3.3-70B-Instruct"

COLUMNS: Final = (
    *("round", "way", "highest first token, s", "90%", "median", "per token, median ms", "mean", "tokens paged in"),
    *("declared, s", "beyond, s"),
)
RATES: Final = (0.45, 0.55, 0.65, 0.75)
STEADY_REQUESTS: Final = 100
STABLE_WAIT_S: Final = 1.0


def declared_pace() -> DevicePace:
    """A step of Llama-70B on two H100s, as one layer: what it takes for itself (weights, launches, reductions), and
    what each token, sequence and cached token adds. Prefills that only wait for weights are charged for both."""
    cost = step_cost(known_spec(PLAYED, PLAYED, 1.0, 0.1, 2), gpu("H100"))
    return DevicePace(
        layer_s=cost.overhead_s + cost.weights_s + cost.comm_s,
        prefill_token_s=cost.gemm_token_s + cost.comm_token_s,
        decode_sequence_s=cost.sequence_s + cost.comm_token_s,
        decode_kv_token_s=cost.kv_token_s,
    )


def shallow_model(models: Path, path: Path) -> Path:
    """demo-llama with one layer whose heads are four times as wide: as much KV, a quarter of the attention calls."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(models / NAME, path, ignore=shutil.ignore_patterns("*.safetensors", "*.json.index"))
    config = LlamaConfig.from_pretrained(models / NAME)
    config.update({"num_hidden_layers": 1, "head_dim": config.num_hidden_layers * config.head_dim})
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


async def stable_rate(bed: BurstBed) -> float:
    """Raises ValueError if the least of :data:`RATES` is too much."""
    handles = [await activate(bed, "first come", i) for i in range(len(RATES))]
    alone = [await bed.ask(handle, 9, 60, 2) for handle in handles]
    alone_s = statistics.mean(asked.ttft_s for asked in alone)
    steady = [[i / rate for i in range(STEADY_REQUESTS)] for rate in RATES]
    played = await asyncio.gather(*(bed.play(*each, 3) for each in zip(handles, steady, strict=True)))
    for handle in handles:
        await handle.deactivate()
    waits_s = [statistics.mean(asked.ttft_s for asked in found) - alone_s for found in played]
    print("; ".join(f"{rate} requests/s: {wait_s:.2f} s" for rate, wait_s in zip(RATES, waits_s, strict=True)))
    stable = [rate for rate, wait_s in zip(RATES, waits_s, strict=True) if wait_s < STABLE_WAIT_S]
    if not stable:
        raise ValueError(f"no rate is stable, {RATES[0]} requests/s cost {waits_s[0]:.1f} s each")
    return max(stable)


async def activate(bed: BurstBed, way: str, number: int) -> EngineHandle:
    """The engine of ``way`` on device ``number``; settings are read when an engine starts."""
    fair, device = way != "first come", bed.devices[number]
    peer = HOST_BYTES_S * PEER_TIMES if way == "fair, peer" else 0.0
    links = {f"host:{number}": DeclaredLinks(host=HOST_BYTES_S, peer=peer)}
    settings = KvSettings(
        host_bytes=2 * DEVICE_BYTES if fair else 0, lend_keep_fraction=0.1 if peer else None, links=links
    )
    write_kv_settings(bed.accounts, settings)
    bed.number += 1
    spec = replace(bed.spec, scheduling=Scheduling.FAIR if fair else Scheduling.DEADLINE)
    key, (part,) = InstanceKey(spec.name, Generation(bed.number)), whole_model([device])
    handle = await bed.pool.activate(key, spec, part)
    handle.set_kv_limit(KV_PAGES * bed.pool.memory[device].page_bytes)
    for seed in range(8):  # what only the first requests after an activation pay, and rates that are measured
        await bed.ask(handle, seed, 120, 10)
    return handle


async def one_round(bed: BurstBed, times_s: list[float], number: int) -> None:
    bed.pool.memory[bed.devices[-1]].offer(DEVICE_BYTES // 10)
    handles = [await activate(bed, way, i) for i, way in enumerate(WAYS)]
    began, start_s = os.times(), time.perf_counter()
    before = [handle.load for handle in handles]
    played = await asyncio.gather(*(bed.play(handle, times_s, 77 + number) for handle in handles))
    await asyncio.sleep(1.5)  # the last counters are told within a second
    load_1m = os.getloadavg()[0]
    for way, handle, first, found in zip(WAYS, handles, before, played, strict=True):
        load = handle.load
        assert load is not None and first is not None
        paced_s, over_s = load.paced_s - first.paced_s, load.overrun_s - first.overrun_s
        print(f"| {number + 1} {row(way, found, load.kv_brought_tokens)} {paced_s:.1f} | {over_s:.1f} |", flush=True)
        await handle.deactivate()
    drop_host_pool(bed.accounts)
    took_s, ended = time.perf_counter() - start_s, os.times()
    print(f"{took_s:.0f} s; the machine's load at the end: {load_1m:.1f}; sender {ended[0] - began[0]:.1f} s of a core")


async def run(models: Path, rate: float, before: int, burst_s: float, rounds: int) -> None:
    pace = declared_pace()
    print(f"devices play two H100s with {PLAYED}: {pace.words}")
    with tempfile.TemporaryDirectory(prefix="prism-m-") as folder:
        shallow = shallow_model(models, Path(folder) / "shallow-llama")
        devices = [DeviceId(f"local/host:{i}") for i in range(len(WAYS) + 1)]
        async with open_bed(pool_spec(shallow), devices, pace) as bed:
            rate = rate or await stable_rate(bed)
            times_s = arrivals(rate, before, burst_s)
            print(f"{rate:.2f} requests/s, then {2 * rate:.2f} for {burst_s:.0f} s: {len(times_s)} requests")
            print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
            for number in range(rounds):
                await one_round(bed, times_s, number)


def main() -> None:
    parser = argparse.ArgumentParser(description="First tokens in a burst on paced devices, by scheduling and link.")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--before", type=int, default=10)
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    asyncio.run(run(given_models(options.models), options.rate, options.before, options.burst_s, options.rounds))


if __name__ == "__main__":
    main()
