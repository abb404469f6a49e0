"""The GPUs of this machine, asked from the driver's management library (no CUDA context is made)."""

from __future__ import annotations

import warnings


def gpu_memory_bytes() -> dict[int, int]:
    """Total memory by GPU index; empty without an NVIDIA driver."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {index: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for index, handle in enumerate(handles)}
    finally:
        pynvml.nvmlShutdown()
