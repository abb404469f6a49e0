"""The table of GPUs: peak rates from the vendor's data sheets and the shares of them that serving reaches.

Sources (peak rates, dense, no sparsity; :data:`GPUS` has bandwidths in one direction, half of those for both ways):

======= ============================================================================================================
A100    NVIDIA A100 data sheet (2021), SXM 80 GB: 312 TFLOPS BF16, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4 x16
        (64 GB/s both ways); the 40 GB model (``A100-40G``) has 1,555 GB/s
A800    as A100, NVLink limited to 400 GB/s both ways (A800 product brief, 2022)
H100    NVIDIA H100 data sheet (2023), SXM: 989.4 TFLOPS BF16, 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5 x16
H800    as H100, NVLink limited to 400 GB/s both ways (H800 product brief, 2023)
H200    NVIDIA H200 data sheet (2024), SXM: 141 GB, 4.8 TB/s, otherwise as H100
B200    NVIDIA HGX B200 data sheet (2024), one of eight: 180 GB, 2.25 PFLOPS BF16, 7.7 TB/s, NVLink 1.8 TB/s both ways
======= ============================================================================================================

What serving reaches of the peaks is on no data sheet. ``docs/sim.md`` ("What the modelled GPU is checked against") has
the public figures behind each default of :class:`GpuKind`, ``docs/results/sim.md`` what each changes; a cluster file
may set any of them (``groups: rates:``), and a measured table replaces them (:mod:`prism.sim.calibration`).

To add a GPU: add an entry to :data:`GPUS` and its source to the table above. Nothing else knows the names. A GPU
without NVLink has 0 for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from prism.core.errors import InvalidValue
from prism.core.specs import DeviceKind

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of device. Rates are of the whole device, in one direction."""

    name: str
    memory_bytes: int
    flops: float
    """Peak dense BF16 floating-point operations per second."""
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """To the other devices of its domain; 0: none."""
    pcie_bytes_per_s: float
    """Host memory to device."""
    compute_efficiency: float = 0.55
    """Of the peak, in prefill (linear layers and attention)."""
    memory_efficiency: float = 0.8
    """Of the bandwidth, reading weights in decode steps."""
    pcie_efficiency: float = 0.85
    step_overhead_s: float = 0.0025
    """Host-side time of every engine step that no kernel overlaps."""
    sequence_overhead_s: float = 0.00001
    """The part of it that grows with each sequence of the step (sampling, bookkeeping)."""
    engine_share: float = 1.0
    """Largest share of the compute that one engine can use (1 / cores for a single-threaded CPU engine)."""
    overhead_is_compute: bool = False
    """The step overhead takes compute from the other engines, too (CPU devices)."""
    overlap_gain: float = 1.4
    """By how much engines that lean on different resources can together exceed one engine's throughput at most."""
    page_bytes: int = 2 << 20
    kv_efficiency: float = 0.7
    """Of the bandwidth, reading keys and values in decode steps."""
    allreduce_s: float = 25e-6
    """One small all-reduce between tensor-parallel ranks, with the wait for the slowest."""
    process_bytes: float = 1.2e9
    """What an engine's process takes of the device beside weights and KV: context, graphs, workspaces."""
    parked_bytes: float = 0.5e9
    """The same of a parked one."""
    thread_share: float = 0.0
    """The part of ``engine_share`` that is the engine's own thread (1 / cores); the rest is what the system does with
    the tokens of one answer, and grows with the tokens per second. 0: nothing is known of that."""

    @property
    def between_bytes_per_s(self) -> float:
        """From one device to another of its machine: over NVLink, or PCIe where there is none."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s * self.pcie_efficiency

    @property
    def device_kind(self) -> DeviceKind:
        """``host`` for devices that the cores of a machine play."""
        return DeviceKind.HOST if self.overhead_is_compute else DeviceKind.CUDA


def _gpu(name: str, gib: float, tflops: float, gbps: float, nvlink_gbps: float, pcie_gbps: float) -> GpuKind:
    return GpuKind(name, int(gib * GIB), tflops * 1e12, gbps * 1e9, nvlink_gbps * 1e9, pcie_gbps * 1e9)


GPUS: Final[dict[str, GpuKind]] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40G", 40, 312.0, 1555, 300, 32),
        _gpu("A100", 80, 312.0, 2039, 300, 32),
        _gpu("A800", 80, 312.0, 2039, 200, 32),
        _gpu("H100", 80, 989.4, 3350, 450, 64),
        _gpu("H800", 80, 989.4, 3350, 200, 64),
        _gpu("H200", 141, 989.4, 4800, 450, 64),
        _gpu("B200", 180, 2250.0, 7700, 900, 64),
        # Two cores of host memory playing a device (host:N); the numbers are a first guess for calibration.
        GpuKind(
            "cpu",
            1 * GIB,
            6e10,
            1.5e10,
            0.0,
            3e9,
            1.0,
            0.8,
            1.0,
            0.004,
            0.0005,
            0.5,
            True,
            1.0,
            kv_efficiency=0.8,
            process_bytes=0.0,
            parked_bytes=0.0,
        ),
    )
}


def gpu(name: str) -> GpuKind:
    """The GPU called ``name``. Raises :class:`InvalidValue` with the known names."""
    try:
        return GPUS[name]
    except KeyError:
        raise InvalidValue("gpu", name, "unknown GPU", sorted(GPUS)) from None


RATES: Final = tuple(f.name for f in fields(GpuKind) if f.type in ("float", float))  # compiled: the type itself
"""What a cluster file may set of a GPU."""


def with_rates(kind: GpuKind, rates: Mapping[str, float]) -> GpuKind:
    """``kind`` with other ``rates`` (keys of :data:`RATES`)."""
    changed: dict[str, float] = dict(rates)
    return replace(kind, **changed) if changed else kind  # type: ignore[arg-type]
