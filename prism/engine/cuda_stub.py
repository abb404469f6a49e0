"""A stand-in for ``libcuda.so.1`` on machines without an NVIDIA driver.

The CUDA wheels that SGLang needs link against the driver library even when they only compute on the CPU. What they call
of it there is one function; the stub answers "no device". It is compiled once into the user's cache and opened before
anything of SGLang is imported; a forked child inherits it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from prism.engine.errors import EngineSetupError

SOURCE: Final = """\
/* CUDA_ERROR_NO_DEVICE */
int cuPointerGetAttribute(void) { return 100; }
"""
_SONAME: Final = "libcuda.so.1"


def driver_present() -> bool:
    """Whether this machine has the real CUDA driver library."""
    try:
        ctypes.CDLL(_SONAME)
    except OSError:
        return False
    return True


def stub_path() -> Path:
    """Where the compiled stub lives: ``$XDG_CACHE_HOME/prism/`` with the source's hash in its folder's name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(SOURCE.encode()).hexdigest()[:12]
    return cache / "prism" / f"cuda-stub-{digest}" / _SONAME


def build(path: Path) -> None:
    """Compile the stub to ``path`` unless it is there. Raises :class:`EngineSetupError` without a C compiler."""
    if path.exists():
        return
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise EngineSetupError("no C compiler (cc, gcc or clang) found; it is needed once to run without a CUDA driver")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_SONAME}", "-x", "c", "-", "-o", str(partial)]
    done = subprocess.run(command, input=SOURCE, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise EngineSetupError(f"{compiler} could not build the CUDA driver stand-in: {done.stderr.strip()}")
    partial.rename(path)


def load() -> None:
    """Make ``libcuda.so.1`` resolvable in this process: the real driver where there is one, else the stub."""
    if driver_present():
        return
    path = stub_path()
    build(path)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
