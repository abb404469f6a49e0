"""Slots of guessed tokens: a step takes some for all guesses of a request, and keeps those of the accepted ones.

::

    | committed ... | taken for this step and the next |      ``reserve`` slots beyond what is committed
    | committed ... a b | . . . . . . . . . . . . . . |       two accepted: their rows are moved to the front

They lie in the model's own KV, under its lease, and go with its requests.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_patches.hooks import Hook, HookKind


def reserve_tokens(scheduler: Any) -> int:
    """Slots beyond a sequence's tokens that a decoding step may take for it; 0 without speculative decoding."""
    if scheduler.spec_algorithm.is_none():
        return 0
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return int(get_alloc_reserve_per_decode(scheduler.server_args))


def move_rows(pool: Any, to: torch.Tensor, source: torch.Tensor) -> None:
    """Replaces ``MHATokenToKVPool._move_kv_cache_impl``, whose kernel takes each layer's rows to lie one behind the
    other: here those of all layers of a token do."""
    for rows in (*pool.k_buffer, *pool.v_buffer):
        rows[to] = rows[source]


def no_kernel(pool: Any) -> None:
    """Replaces ``MHATokenToKVPool._init_kv_copy_and_warmup``, which compiles that kernel."""
    pool._kv_copy_config = None


_MHA = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
HOOKS = (
    Hook(
        f"{_MHA}._move_kv_cache_impl",
        HookKind.REPLACE,
        move_rows,
        ("self", "tgt_loc", "src_loc"),
        "accepted rows move in a layout of Prism's",
    ),
    Hook(
        f"{_MHA}._init_kv_copy_and_warmup",
        HookKind.REPLACE,
        no_kernel,
        ("self",),
        "nothing is compiled that is not used",
    ),
)
