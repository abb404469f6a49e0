"""What the items of stage 1 work on: the driver and a device with an account, real or made of host memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prism import memory
from scripts.gpu.driver import Driver
from scripts.gpu.run import Run


def driver_library(run: Run) -> str:
    """The driver's library; in a dry run the stand-in, compiled once into the scratch folder."""
    if not run.dry:
        return "libcuda.so.1"
    from tests.memory.drivers import build_fake  # tests travel with the tree

    found = run.scratch / "libfakecuda.so"
    return str(found if found.exists() else build_fake(run.scratch))


def open_driver(run: Run) -> Driver:
    return Driver(driver_library(run))


@contextmanager
def owner_on_gpu(run: Run, capacity_bytes: int) -> Iterator[memory.Owner]:
    """An owner of ``cuda:0``, alone in an account of its own."""
    library = driver_library(run) if run.dry else None
    with tempfile.TemporaryDirectory() as folder:
        device = memory.open_device("cuda:0", capacity_bytes, account_dir=Path(folder), cuda_library=library)
        with device.register("kit") as owner:
            yield owner
        run.check(not (problems := device.audit().problems), f"the account and the driver disagree: {problems}")
