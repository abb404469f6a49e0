"""KV memory: SGLang's buffers become views over reserved addresses whose pages come and go.

Token-major layout: K and V of all layers of one token are adjacent; memory grows by a page, not by a page per layer::

    slot 0            slot 1            ...
    | k0 v0 k1 v1 .. | k0 v0 k1 v1 .. | ...        (k_l: heads x dim of layer l)

Only plain multi-head or grouped-query attention with page size 1 has this layout; everything else is refused by
:func:`refuse_unsupported`.
"""

from __future__ import annotations

from typing import Any, Final

from prism import memory
from prism.core.errors import PrismError
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.seat import Seat

_ROOM_WAIT_S: Final = 5.0
"""How long an activation waits for its first block: neighbours give up cached prefixes between two of their steps."""


def create_buffers(pool: Any) -> None:
    """Replaces ``MHATokenToKVPool._create_buffers_normal``: divide the worker's arena for this model."""
    seat = current_seat()
    layout = memory.KvLayout(
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype_bytes=pool.store_dtype.itemsize,
        order="token",
    )
    pool.prism_seat = seat
    pool.prism_pool = seat.kv_arena.divide(layout, max_tokens=pool.size, lease_bytes=0, timeout_s=_ROOM_WAIT_S)
    pool.k_buffer, pool.v_buffer = memory.torch_views(pool.prism_pool, pool.store_dtype)


def current_seat() -> Seat:
    """The seat of the activation that is going on in this process."""
    from sglang.srt.runtime_context import get_server_args

    seat: Seat = get_server_args().prism_seat
    return seat


def refuse_unsupported(configurator: Any, **_: Any) -> None:
    """Before ``KVCacheConfigurator._build_token_to_kv_pool``: only the layout Prism manages may pass."""
    kinds = {
        "multi-head latent attention (MLA)": configurator.use_mla_backend,
        "sliding-window attention": configurator.is_hybrid_swa,
        "Mamba or linear attention": configurator.mambaish_config is not None,
        "a KV page size other than 1": configurator.server_args.page_size != 1,
        "speculative decoding": configurator.server_args.speculative_algorithm is not None,
        "a quantized KV cache": configurator.kv_cache_dtype.itemsize < 2,
    }
    found = [kind for kind, present in kinds.items() if present]
    if found:
        raise UnsupportedModel(f"the engine does not manage the KV memory of {' and '.join(found)}")


class UnsupportedModel(PrismError):
    """The model's attention state has a layout that Prism's memory does not manage."""


def profile_available_bytes(configurator: Any, pre_model_load_memory: float) -> int:
    """Replaces ``KVCacheConfigurator._profile_available_bytes``: the virtual size, since pages come on demand."""
    seat: Seat = configurator.server_args.prism_seat
    return seat.kv_capacity_bytes


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
        HookKind.REPLACE,
        create_buffers,
        ("self",),
        "KV buffers are views over reserved addresses",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        HookKind.REPLACE,
        profile_available_bytes,
        ("self", "pre_model_load_memory"),
        "the pool's size is address space, not memory",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        HookKind.BEFORE,
        refuse_unsupported,
        ("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        "other layouts would take memory outside the account",
    ),
)
