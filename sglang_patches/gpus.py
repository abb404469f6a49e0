"""What SGLang asks of GPUs that does not hold here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.hooks import Hook, HookKind


def store_in_any_row(
    original: Callable[..., None], k: Any, v: Any, k_cache: Any, *rest: Any, size_limit: int, **kwargs: Any
) -> None:
    """Around ``_set_kv_buffer_impl``: its kernel traps on a slot beyond the pool's size, but slots are numbered with
    gaps where a token would straddle two blocks. The bound is the rows of ``k_cache``."""
    original(k, v, k_cache, *rest, size_limit=k_cache.shape[0], **kwargs)


def gpu_memory_mib(original: Callable[..., Any], device: str | None = None) -> Any:
    """Around ``get_device_memory_capacity`` as ``ServerArgs`` calls it, which runs ``nvidia-smi`` each time and takes
    the smallest GPU of the machine."""
    if device != "cuda" or not torch.cuda.is_available():
        return original(device)
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / (1 << 20)


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool._set_kv_buffer_impl",
        HookKind.AROUND,
        store_in_any_row,
        (
            "k",
            "v",
            "k_cache",
            "v_cache",
            "indices",
            "row_dim",
            "store_dtype",
            "device_module",
            "size_limit",
            "alt_stream",
            "same_kv_dim",
        ),
        "slots reach the rows of the views, not the pool's size",
    ),
    Hook(
        "sglang.srt.server_args.get_device_memory_capacity",
        HookKind.AROUND,
        gpu_memory_mib,
        ("device",),
        "no process is spawned for a number that the driver says",
    ),
)
