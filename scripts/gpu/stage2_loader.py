"""Stage 2: how fast do weights get from host memory onto the GPU, against a plain copy from pinned memory?"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks.weights.load_host import make_pack
from prism import memory
from prism.weights.loading.gpu_loader import Lane, load_gpu
from prism.weights.loading.loader import load
from prism.weights.packs.format import PackKey
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from scripts.gpu.run import Run
from scripts.gpu.stage import Item, Stage, run_stage

KEY = PackKey("benchmark")
GB = 1e9


def pack_bytes(run: Run) -> int:
    return 16_000_000 if run.dry else 8_000_000_000


def store_of(run: Run) -> WeightStore:
    """The store in the scratch folder, which the items share."""
    folder = run.scratch / ("dry" if run.dry else "gpu")
    return WeightStore(folder / "store", host_directory=folder / "host")


@contextmanager
def packed(run: Run) -> Iterator[ResidentPack]:
    """The pack in shared host memory; made if an earlier item has not."""
    store = store_of(run)
    found = store.get(KEY)
    if found is None:
        make_pack(store, pack_bytes(run))
        found = store.get(KEY)
    assert found is not None
    try:
        yield found
    finally:
        found.close()


@contextmanager
def region_for(run: Run, pack: ResidentPack) -> Iterator[memory.WeightRegion]:
    """Committed memory of the device, as large as the pack."""
    nbytes = pack.header.data_bytes
    name = "host:0" if run.dry else "cuda:0"
    with (
        tempfile.TemporaryDirectory() as folder,
        memory.open_device(name, 2 * nbytes + (64 << 20), account_dir=Path(folder)).register("kit") as owner,
    ):
        region = owner.weight_region(nbytes)
        region.commit()
        yield region
        region.close()


def best_rate(action: Callable[[], object], nbytes: int, rounds: int = 4) -> float:
    """GB/s of the median round after a first one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return nbytes / statistics.median(times[1:]) / GB


def pinned_rate() -> float:
    """The link's limit: GB/s of 1 GiB from pinned memory, from events on the GPU."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return best_rate(copy, source.numel())


def make(run: Run) -> None:
    """The pack that the other items copy, in shared host memory."""
    start_s = time.perf_counter()
    with packed(run) as pack:
        seconds = time.perf_counter() - start_s
        run.reading("pack in host memory", pack.header.data_bytes / GB, "GB")
        run.remark(f"made or found in {seconds:.1f} s")


def raw(run: Run) -> None:
    """Copies without Prism: from pinned memory, from pageable memory, and from the pack after registering it."""
    run.needs_gpu()
    import cupy
    import torch

    limit = pinned_rate()
    run.reading("pinned copy", limit, "GB/s", goal=50, less_is_better=False)
    pageable = torch.ones(1 << 30, dtype=torch.uint8)
    target = torch.empty_like(pageable, device="cuda")
    rate = best_rate(lambda: target.copy_(pageable), pageable.numel())
    run.reading("pageable copy", rate, "GB/s", limit=limit, less_is_better=False)
    runtime: Any = cupy.cuda.runtime
    with packed(run) as pack:
        nbytes = min(1 << 30, pack.header.data_bytes)
        start_s = time.perf_counter()
        try:
            runtime.hostRegister(pack.address, nbytes, 0)
        except runtime.CUDARuntimeError as error:
            run.check(False, f"the pack's shared memory cannot be registered: {error}")
            return
        run.reading("registering", nbytes / (time.perf_counter() - start_s) / GB, "GB/s", less_is_better=False)

        def copy() -> None:
            runtime.memcpy(target.data_ptr(), pack.address, nbytes, runtime.memcpyHostToDevice)

        rate = best_rate(copy, nbytes)
        run.reading("copy from the registered pack", rate, "GB/s", goal=0.9 * limit, limit=limit, less_is_better=False)
        runtime.hostUnregister(pack.address)


def product(run: Run) -> None:
    """The load that an activation does; the first one imports CuPy and pins buffers, as a parked worker has done."""
    limit = None if run.dry else pinned_rate()
    with packed(run) as pack, region_for(run, pack) as region:
        nbytes = pack.header.data_bytes
        start_s = time.perf_counter()
        load(pack, region)
        run.reading("first load", nbytes / (time.perf_counter() - start_s) / GB, "GB/s", less_is_better=False)
        rate = best_rate(lambda: load(pack, region), nbytes)
        goal = None if limit is None else 0.9 * limit
        run.reading("load", rate, "GB/s", goal=goal, limit=limit, less_is_better=False)
        rate = best_rate(lambda: load(pack, region, verify=True), nbytes, 2)
        run.reading("load, every byte verified again", rate, "GB/s", limit=limit, less_is_better=False)
        check_contents(run, pack, region)
    run.needs_gpu()


def lanes(run: Run) -> None:
    """The same over several lanes of one link, each with a thread that copies: what do more bring?"""
    limit = None if run.dry else pinned_rate()
    with packed(run) as pack, region_for(run, pack) as region:
        for count in (1, 2, 4, 8):
            with ExitStack() as stack:
                opened = open_lanes(run, count)
                for lane in opened:
                    stack.callback(lane.settle)
                rate = best_rate(lambda here=opened: load_gpu(pack, region.address, here), pack.header.data_bytes, 2)  # type: ignore[misc]
            run.reading(f"{count} lanes", rate, "GB/s", limit=limit, less_is_better=False)
        check_contents(run, pack, region)
    run.needs_gpu()


def open_lanes(run: Run, count: int) -> Sequence[Lane]:
    if run.dry:
        from tests.weights.test_loader import FakeLane

        return cast(list[Lane], [FakeLane() for _ in range(count)])
    from prism.weights.loading.cuda_lanes import CudaLane

    return [CudaLane(0) for _ in range(count)]


def check_contents(run: Run, pack: ResidentPack, region: memory.WeightRegion) -> None:
    """The first and the last MiB of the data are in the region."""
    import torch

    nbytes = pack.header.data_bytes
    for start in (0, nbytes - (1 << 20)):
        found = region.tensor(start, (1 << 20,), torch.uint8).cpu().numpy().tobytes()
        run.check(found == bytes(pack.data[start : start + (1 << 20)]), f"other bytes than the pack's at {start}")


def clean(run: Run) -> None:
    """Give the host memory back."""
    shutil.rmtree(run.scratch / ("dry" if run.dry else "gpu"), ignore_errors=True)


STAGE = Stage(
    "scripts.gpu.stage2_loader",
    __doc__,
    (
        Item("make", make, 120),
        Item("raw", raw, 120),
        Item("product", product, 120),
        Item("lanes", lanes, 150),
        Item("clean", clean, 30),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
