"""The GPUs this process may use, asked from the driver's management library (NVML): no CUDA context is made.

Three numberings meet here. NVML counts all GPUs of the machine in the order of their PCI addresses. CUDA counts those
that ``CUDA_VISIBLE_DEVICES`` lets through, in the order of that list (``CUDA_DEVICE_ORDER=PCI_BUS_ID``, which Prism's
processes set, makes the list's numbers NVML's). ``cuda:N`` in a catalog is CUDA's number, the UUID the GPU's own name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from prism.core.errors import PrismError

ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment of every process that uses CUDA, so that its numbers mean what :func:`read_gpus` says."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_MPS: Final = "nvidia-cuda-mps"
"""What the names of its control daemons and servers begin with."""


class NoDriver(PrismError):
    """There is no NVIDIA driver, or it does not answer; the message says which."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """CUDA's number: ``cuda:N``."""
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    """By all processes of the machine, now."""
    capability: tuple[int, int]
    numa_node: int | None
    """The host memory it is near to; None: the machine has one, or does not say."""
    nvlinks: tuple[int, ...]
    """Numbers of the visible GPUs that it reaches over NVLink."""
    problem: str
    """Why Prism cannot share it and what to do about it; "" when it can."""


@dataclass(frozen=True, slots=True)
class GpuSet:
    """What this process sees of the machine's GPUs."""

    cuda_version: tuple[int, int]
    """Newest CUDA that the driver supports."""
    gpus: tuple[Gpu, ...]

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Total memory of the GPUs that can be shared, by number."""
        return {gpu.index: gpu.memory_bytes for gpu in self.gpus if not gpu.problem}

    @property
    def refused(self) -> dict[int, str]:
        """Why the others cannot be."""
        return {gpu.index: gpu.problem for gpu in self.gpus if gpu.problem}

    @property
    def islands(self) -> tuple[frozenset[int], ...]:
        """Groups of GPUs that reach each other over NVLink, directly or over others; a GPU without links is in none."""
        found: list[frozenset[int]] = []
        for gpu in self.gpus:
            group = frozenset({gpu.index, *gpu.nvlinks})
            touching = [island for island in found if island & group]
            if gpu.nvlinks:
                found = [island for island in found if island not in touching] + [group.union(*touching)]
        return tuple(sorted(found, key=min))


def read_gpus(environ: Mapping[str, str] = os.environ, *, mps: bool | None = None) -> GpuSet:
    """Raises :class:`NoDriver`. ``mps``: a control daemon runs (None: look), which may own GPUs in exclusive mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise NoDriver("not installed") from None
    except pynvml.NVMLError as error:
        raise NoDriver(f"installed, but it does not answer: {error}") from None
    try:
        return _read(pynvml, environ.get(_VISIBLE), mps_runs() if mps is None else mps)
    except pynvml.NVMLError as error:
        raise NoDriver(f"installed, but it does not answer: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def gpus_if_any() -> GpuSet:
    """:func:`read_gpus`; none without an NVIDIA driver."""
    try:
        return read_gpus()
    except NoDriver:
        return GpuSet((0, 0), ())


def numa_node_of(index: int) -> int | None:
    """The host memory that ``cuda:index`` is near to; None where nobody says."""
    return next((gpu.numa_node for gpu in gpus_if_any().gpus if gpu.index == index), None)


def mps_daemons() -> int:
    """How many MPS control daemons run. A pipe alone proves nothing: it may be a dead one's."""
    names = [str(process.info["name"]) for process in psutil.process_iter(["name"])]
    daemons = sum(name.startswith(f"{_MPS}-control") for name in names)
    return daemons or int(any(name.startswith(_MPS) for name in names))  # names may be cut: then it is one at least


def mps_runs() -> bool:
    """Whether an MPS control daemon of this user (or root) is running."""
    return mps_daemons() > 0


def visible_order(listed: str | None, uuids: Sequence[str]) -> list[int]:
    """NVML's numbers of the GPUs that ``CUDA_VISIBLE_DEVICES=listed`` lets through, in CUDA's order. As CUDA reads it:
    numbers or beginnings of UUIDs, the list ends at the first entry that names none, and a repeated entry hides all."""
    if listed is None:
        return list(range(len(uuids)))
    order: list[int] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(matching) != 1:
            break
        if matching[0] in order:
            return []
        order += matching
    return order


def _read(nvml: Any, listed: str | None, mps: bool) -> GpuSet:
    version = nvml.nvmlSystemGetCudaDriverVersion()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    order = visible_order(listed, [nvml.nvmlDeviceGetUUID(handle) for handle in handles])
    visible = [handles[index] for index in order]
    gpus = tuple(_gpu(nvml, index, visible, mps) for index in range(len(visible)))
    return GpuSet((version // 1000, version % 1000 // 10), gpus)


def _gpu(nvml: Any, index: int, visible: Sequence[Any], mps: bool) -> Gpu:
    handle = visible[index]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        capability=(capability[0], capability[1]),
        numa_node=_numa_node(nvml, handle),
        nvlinks=tuple(i for i, other in enumerate(visible) if i != index and _is_linked(nvml, handle, other)),
        problem=_problem(nvml, handle, mps),
    )


def _numa_node(nvml: Any, handle: Any) -> int | None:
    """From the kernel: NVML tells it for a few products only."""
    address = str(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]  # the kernel writes the domain with 4 digits
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _is_linked(nvml: Any, first: Any, second: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _problem(nvml: Any, handle: Any, mps: bool) -> str:
    try:
        is_divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError_NotSupported:
        is_divided = False
    if is_divided:
        return "it is divided by MIG, whose parts share no memory; turn MIG off (nvidia-smi -mig 0) or leave it out"
    mode = nvml.nvmlDeviceGetComputeMode(handle)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return "its compute mode prohibits CUDA; set it to default (nvidia-smi -c 0)"
    if mode != nvml.NVML_COMPUTEMODE_DEFAULT and not mps:
        return "its compute mode lets one process in, but every engine is one; set it to default (nvidia-smi -c 0)"
    return ""
