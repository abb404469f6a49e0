"""What an engine pool has to know about GPUs of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def mps_control_pipe() -> Path | None:
    """The control pipe of a running CUDA MPS daemon, None when there is none."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control"
    return pipe if pipe.exists() else None


def mps_remark() -> str:
    """One line for the log: whether engines that share a GPU run side by side or take turns."""
    if mps_control_pipe() is not None:
        return "CUDA MPS is running: engines of one GPU compute side by side (each may use all of it)"
    return "CUDA MPS is not running: engines of one GPU take turns; start it with `nvidia-cuda-mps-control -d`"
