"""Stage 8: several GPUs for one model, what lies between them, and quantised weights."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from prism import memory
from prism.core.specs import DeviceKind
from prism.engine.sglang_args import server_arguments
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.memory.gpus import read_gpus
from scripts.gpu.bench_rig import OUTER, bench, model, need_gpus
from scripts.gpu.run import Run
from scripts.gpu.stage import Item, Stage, run_stage
from scripts.gpu.stage2_loader import best_rate
from scripts.gpu.stage5_sharing import prompt
from scripts.gpu.stage7_layouts import sizes
from scripts.gpu.stock_answers import ask_stock

QUANTISED: Final[dict[str, Any]] = {"quantization": "fp8"}
COPIED_BYTES: Final = 1 << 30
LINK_BYTES_S: Final = 4e6
"""Of virtual devices in a dry run, so slow that a helper has time."""


def tensor_parallel(run: Run) -> None:
    """One model on two GPUs: the answers of one GPU, ranks that are parked as a whole and come back."""
    need_gpus(run, 2)
    asyncio.run(_tensor_parallel(run, model(run, "0.6b" if run.dry else "8b")))
    run.needs_gpu()


async def _tensor_parallel(run: Run, folder: Path) -> None:
    new = 8 if run.dry else 24
    async with bench(run, gpus=2) as at:
        handle, _ = await at.activate(folder)
        alone = await at.generate(handle, prompt(1), new)
        await handle.deactivate()
        found, pids = [], []
        for turn in ("first", "second", "third"):
            handle, seconds = await at.activate(folder, ranks=2)
            run.reading(f"{turn} activation on two", seconds, "s", goal=1.5 if turn != "first" else None)
            run.remark(f"{turn}: " + ", ".join(f"{phase} {value:.3f}" for phase, value in handle.phases.items()))
            run.check(turn == "first" or handle.info.from_image, f"the {turn} activation read the model's files")
            run.reading(f"{turn} time to first token", await at.first_token_s(handle, prompt(2, 200)), "s", goal=0.2)
            found.append(await at.generate(handle, prompt(1), new))
            pids.append(handle.pids)
            await handle.deactivate()
        run.check(found[0] == found[1] == found[2], f"greedy answers differ: {found}")
        run.check(found[0][0] == alone[0], f"another first token than on one GPU: {found[0]} against {alone}")
        run.check(pids[0] == pids[1] == pids[2], "the ranks were not parked as a whole")
        for device in at.rig.devices:
            problems = at.rig.pool.memory[device].audit().problems
            run.check(not problems, f"the account of {device} and the driver disagree: {problems}")


def helpers(run: Run) -> None:
    """Weights over another GPU's link, too: parked workers there stage parts of them, which come over NVLink."""
    need_gpus(run, 2)
    if not run.dry and not any(gpu.nvlinks for gpu in read_gpus(OUTER).gpus[:2]):
        run.skip("no NVLink between the GPUs: each loads over its own link")
    asyncio.run(_helpers(run, model(run, "0.6b" if run.dry else "8b")))
    run.needs_gpu()


async def _helpers(run: Run, folder: Path) -> None:
    async with bench(run, gpus=2, load_helpers=1) as at:
        if run.dry:
            links = {f"host:{i}": DeclaredLinks(host=LINK_BYTES_S, peer=10 * LINK_BYTES_S) for i in range(2)}
            write_kv_settings(at.rig.folder / "accounts", KvSettings(links=links))
        first, _ = await at.activate(folder)
        expected = await at.generate(first, prompt(1), 8)
        await first.deactivate()
        rates: dict[int, float] = {}
        for most in (0, 1, 0, 1):
            at.rig.pool.helpers.most = most
            handle, _ = await at.activate(folder)
            nbytes, copy_s = handle.info.weight_bytes, handle.phases["weights.copy"]
            rates[most] = max(rates.get(most, 0.0), nbytes / copy_s / 1e9)
            run.check(bool(handle.helped_bytes) == bool(most), f"{most} helpers may help, {handle.helped_bytes} did")
            run.remark(f"{most} helpers: {copy_s:.3f} s, {sum(handle.helped_bytes.values()) / nbytes:.0%} over helpers")
            found = await at.generate(handle, prompt(1), 8)
            run.check(found == expected, f"{found} instead of {expected} with {most} helpers")
            await handle.deactivate()
        run.reading("alone", rates[0], "GB/s")
        run.reading("with one helper", rates[1], "GB/s", goal=1.8 * rates[0], limit=2 * rates[0], less_is_better=False)
        for device in at.rig.devices:
            problems = at.rig.pool.memory[device].audit().problems
            run.check(not problems, f"the account of {device} and the driver disagree: {problems}")


def peers(run: Run) -> None:
    """What lies between the GPUs: NVLink as the driver names it, copies between plain tensors, and from another GPU
    into memory that Prism maps (loading over helper GPUs needs it)."""
    if run.dry:
        run.skip("needs 2 GPUs")
    need_gpus(run, 2)
    import torch

    gpus = read_gpus(OUTER).gpus
    for gpu in gpus:
        run.remark(f"cuda:{gpu.index} {gpu.name}, NUMA node {gpu.numa_node}, NVLink to {gpu.nvlinks}")
    for a, b in itertools.combinations(range(len(gpus)), 2):
        reaches = torch.cuda.can_device_access_peer(a, b)
        run.remark(f"cuda:{a} {'reaches' if reaches else 'DOES NOT REACH'} cuda:{b} without the host")
    source = torch.full((COPIED_BYTES,), 7, dtype=torch.uint8, device="cuda:1")
    plain = torch.empty_like(source, device="cuda:0")
    limit = _copy_rate(source, plain)
    linked = bool(gpus[0].nvlinks)
    run.reading("copy between tensors", limit, "GB/s", goal=150 if linked else 20, less_is_better=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        memory.open_device("cuda:0", 2 * COPIED_BYTES, account_dir=Path(folder)).register("kit") as owner,
    ):
        region = owner.weight_region(COPIED_BYTES)
        region.commit()
        mapped = region.tensor(0, (COPIED_BYTES,), torch.uint8)
        rate = _copy_rate(source, mapped)
        run.reading(
            "copy into Prism's pages",
            rate,
            "GB/s",
            goal=0.9 * limit,
            limit=limit,
            is_estimate=False,
            less_is_better=False,
        )
        run.check(bool((mapped == 7).all()), "other bytes than were copied")
        del mapped
        region.close()


def _copy_rate(source: object, target: object) -> float:
    import torch

    assert isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    return best_rate(copy, COPIED_BYTES)


def quantised(run: Run) -> None:
    """8-bit weights, made of bfloat16 ones as they are loaded: SGLang's own answers, and half of the memory."""
    folder = model(run, "0.6b")
    run.needs_gpu()
    asyncio.run(_quantised(run, folder))


async def _quantised(run: Run, folder: Path) -> None:
    prompts, new = sizes(run)
    async with bench(run) as at:
        spec = at.rig.spec_at(folder, **QUANTISED)
        arguments = {**server_arguments(spec, DeviceKind.CUDA), "mem_fraction_static": 0.4}
        expected = await asyncio.to_thread(ask_stock, run, arguments, prompts, new)
        whole, _ = await at.activate(folder)
        whole_bytes = whole.info.weight_bytes
        await whole.deactivate()
        for turn in ("first", "second"):
            handle, seconds = await at.activate(folder, **QUANTISED)
            run.reading(f"{turn} activation", seconds, "s", goal=1.5 if turn == "second" else None)
            run.check(turn == "first" or handle.info.from_image, "the second activation was not from an image")
            run.reading(f"{turn}: weights over bfloat16's", handle.info.weight_bytes / whole_bytes, "x", goal=0.7)
            found = [await at.generate(handle, each, new) for each in prompts]
            run.check(expected is None or found == expected, f"{turn}: {found} instead of {expected}")
            await handle.deactivate()


STAGE = Stage(
    "scripts.gpu.stage8_teams",
    __doc__,
    (
        Item("quantised", quantised, 180),
        Item("tensor_parallel", tensor_parallel, 240),
        Item("helpers", helpers, 180),
        Item("peers", peers, 60),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
