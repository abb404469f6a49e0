"""Where compiled kernels are kept. SGLang, Triton, FlashInfer and torch compile some at their first use, for half a
minute and more; every process of this user finds what another has compiled, also after a boot."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

FOLDERS: Final = {
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variable -> folder in :func:`kernel_cache`. What the environment says already stays."""
COMPILED: Final = frozenset({".so", ".cubin"})


def kernel_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's: ``$XDG_CACHE_HOME/prism/kernels``."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism" / "kernels"


def keep_kernels(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have what this process and its children compile kept in one place. Before anything of it is imported."""
    for name, folder in FOLDERS.items():
        environ.setdefault(name, str(kernel_cache(environ) / folder))


def compiled_kernels(environ: Mapping[str, str] = os.environ) -> set[Path]:
    """Libraries and kernels that are there."""
    found: set[Path] = set()
    for name, folder in FOLDERS.items():
        root = Path(environ.get(name) or kernel_cache(environ) / folder)
        found.update(path for path in root.rglob("*") if path.suffix in COMPILED)
    return found
