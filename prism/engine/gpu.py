"""What an engine pool has to know about the GPUs of this machine and the tools beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from prism.memory.gpus import mps_runs


def mps_remark() -> str:
    """One line for the log: whether engines that share a GPU run side by side or take turns."""
    if mps_runs():
        return "CUDA MPS is running: engines of one GPU compute side by side (each may use all of it)"
    return "CUDA MPS is not running: engines of one GPU take turns; start it with `nvidia-cuda-mps-control -d`"


def cuda_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The CUDA toolkit whose compiler SGLang's kernels are made with at their first use: as the environment says, else
    the one on the path, else the one that came with torch's packages (which nothing finds by itself). None: none has a
    compiler."""
    named = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    beside = [] if on_path is None else [Path(on_path).resolve().parent.parent]
    usual = [Path("/usr/local/cuda")]
    package = util.find_spec("nvidia")
    packaged = [Path(folder) / "cu13" for folder in (package.submodule_search_locations or ())] if package else []
    return next((home for home in (*named, *beside, *usual, *packaged) if (home / "bin" / "nvcc").is_file()), None)
