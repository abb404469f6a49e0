"""Bring SGLang into this process once: environment, driver stand-in, imports, patches, and the checks on them."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Final

from prism.engine import cpu_operators, cuda_stub
from prism.engine.errors import EngineSetupError
from prism.engine.gpu import cuda_home
from prism.engine.kernels import keep_kernels
from prism.memory.gpus import ORDER

PLUGIN_GROUP: Final = "sglang.srt.plugins"
PLUGIN_NAME: Final = "prism"

ENVIRONMENT: Final = {
    "PRISM_ENGINE": "1",  # sglang_patches does nothing in processes that are not Prism's
    "SGLANG_PLUGINS": PLUGIN_NAME,
    "SGLANG_USE_PICKLE_IPC": "0",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",  # what encoders made of images would be kept outside of the account
    "TOKENIZERS_PARALLELISM": "false",
    # Slots that left their window go every so many steps (SGLang: 128); until then a sequence holds them beside it.
    "SGLANG_SWA_EVICTION_INTERVAL": "32",
}
HOST_ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",  # what only Triton's kernels compute runs on virtual devices, slowly
}
KEPT_MEMORY: Final = {
    -3: 32 << 20,  # M_MMAP_THRESHOLD: the most that glibc takes
    -1: 64 << 20,  # M_TRIM_THRESHOLD
}
CUDA_ENVIRONMENT: Final = {
    **ORDER,
    # Ranks of a model may stand on GPUs that others use too, with unequal memory left.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # SGLang would size its own KV pool after capturing graphs; ours has no size but the lease.
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "0",
}

WARM_MODULES: Final = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.openai.serving_chat",
    "sglang.srt.entrypoints.openai.serving_completions",
    "xgrammar",
)
"""Imported once in the zygote: what an engine needs and what a front-door worker needs."""

GPU_MODULES: Final = ("flashinfer", "cutlass", "cuda", "quack")
"""Kernels for GPUs and what makes them, which SGLang uses where they are installed. Importing them takes a quarter of
a start's processor time (docs/results/engine.md), and on virtual devices nothing of them can run."""


def prepare_environment(kind: str) -> None:
    """Set what SGLang and torch read at import time. ``kind``: ``host`` or ``cuda``."""
    os.environ.update(ENVIRONMENT)
    if kind == "host":
        os.environ.update(HOST_ENVIRONMENT)
        return
    os.environ.update(CUDA_ENVIRONMENT)
    keep_kernels()
    if (home := cuda_home()) is not None:
        os.environ["CUDA_HOME"] = str(home)


def boot(kind: str) -> None:
    """Import all that an engine or a front-door worker needs and put the patches in force.

    Raises :class:`EngineSetupError` when this installation cannot run engines, :class:`sglang_patches.hooks.PatchError`
    when SGLang is not what the patches were written for.
    """
    prepare_environment(kind)
    cuda_stub.load()
    if kind == "host":
        leave_out_gpu_modules()
    with uncollected():
        for module in WARM_MODULES:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise EngineSetupError(f"{module} cannot be imported: {error}") from error
    if kind == "host":
        keep_freed_memory()
        cpu_operators.declare_missing()
    apply_patches()
    if kind == "host":
        importlib.import_module("sglang_patches.quantised").prepare()
        importlib.import_module("sglang_patches.host_operators").prepare()
        importlib.import_module("sglang_patches.host_attention").prepare()


def leave_out_gpu_modules() -> None:
    """As if :data:`GPU_MODULES` were not installed, for what imports SGLang after this."""
    for module in GPU_MODULES:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]


@contextmanager
def uncollected() -> Iterator[None]:
    """The objects of thousands of modules stay. Looking through all that are there already, again and again, is a tenth
    of the processor time that importing them takes (docs/results/engine.md)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def keep_freed_memory() -> None:
    """Have the C library keep what a virtual device's step freed for the next step, up to 64 MiB.

    A step allocates its activations again. Given back to the kernel between steps, each of their pages is faulted in
    and zeroed again: 5 to 10% of a prefill's processor time. Values of
    ``mallopt(3)``; engines inherit them from the zygote.
    """
    library = ctypes.CDLL(None)
    if not all(library.mallopt(option, value) for option, value in KEPT_MEMORY.items()):
        raise EngineSetupError(f"mallopt refuses {KEPT_MEMORY}: the C library is not glibc")


def apply_patches() -> None:
    """Load the plugin the way SGLang does, then check that every patch is in force (SGLang swallows plugin errors)."""
    from sglang.srt.plugins import load_plugins

    plugin = [p for p in entry_points(group=PLUGIN_GROUP) if p.name == PLUGIN_NAME]
    if not plugin:
        raise EngineSetupError(f"entry point {PLUGIN_GROUP}:{PLUGIN_NAME} is not installed; run `make install`")
    module = importlib.import_module(plugin[0].module)
    module.check()
    load_plugins()
    module.check_applied()
