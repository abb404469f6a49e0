"""Errors of a GPU after which something must be replaced: one process, or everything on the GPU."""

from __future__ import annotations

import re
from typing import Final

from prism.core.ids import DeviceId
from prism.memory import errors as memory

_PHRASES: Final = {
    "busy or unavailable": 46,
    "no CUDA-capable device": 100,
    "uncorrectable ECC error": 214,
    "uncorrectable NVLink error": 220,
    "hardware error": 226,
    "an illegal memory access": 700,
    "launch timed out": 702,
    "device-side assert": 710,
    "hardware stack error": 714,
    "illegal instruction": 715,
    "misaligned address": 716,
    "not supported on global/shared address space": 717,
    "invalid program counter": 718,
    "unspecified launch failure": 719,
    "Tensor Memory not completely freed": 721,
    "MPS": 805,
    "unknown error": 999,
}
"""How CUDA words its results, in torch's exceptions, and the numbers of those that no process survives."""
_OF_THE_GPU: Final = frozenset({46, 100, 214, 220, 226, *range(805, 811), 999})
"""Not of what one process did: hardware, a GPU that is gone, the MPS server."""
STRIKES: Final = 2
"""Workers that could not start one after the other, and none that could: the device is out of service."""


def fatal_code(error: BaseException) -> int | None:
    """CUDA's number for what ended the process's use of its GPU; None: it was something else."""
    for one in memory.causes(error):
        if isinstance(one, memory.DeadDriver):
            return one.numbers.get("cuda_result", 999)
        found = re.search(r"CUDA (?:driver )?error: (.*)", str(one))
        if found:
            return next((code for phrase, code in _PHRASES.items() if phrase in found[1]), None)
    return None


def concerns_whole_gpu(code: int, mps: bool) -> bool:
    """Whether other processes on the GPU are of no use either. Under MPS they share one context with the one at fault,
    and the server takes no new one until all old ones are gone."""
    return mps or code in _OF_THE_GPU


class DeviceFaults:
    """Devices on which workers do not start, and why."""

    def __init__(self) -> None:
        self._failures: dict[DeviceId, list[str]] = {}

    def failed(self, device: DeviceId, reason: str) -> None:
        self._failures.setdefault(device, []).append(reason)

    def started(self, device: DeviceId) -> None:
        self._failures.pop(device, None)

    def reasons(self) -> dict[DeviceId, str]:
        """Why devices are out of service."""
        return {device: reasons[-1] for device, reasons in self._failures.items() if len(reasons) >= STRIKES}
