"""KV memory: SGLang's buffers become views over reserved addresses whose pages come and go.

Token-major layout: K and V of all layers of one token are adjacent; memory grows by a page, not by a page per layer::

    slot 0            slot 1            ...
    | k0 v0 k1 v1 .. | k0 v0 k1 v1 .. | ...        (k_l: heads x dim of layer l)

Latent attention has one row per token and layer and no V (:mod:`sglang_patches.kv_mla`). With pages of more than one
token a slot is such a page. Which layouts may be here at all says :mod:`sglang_patches.kv_guard`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from prism import memory
from prism.memory import GroupKind, KvGroup
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import refuse
from sglang_patches.seat import Seat
from sglang_patches.spec_draft import joint_layout, rows_of_pool

_ROOM_WAIT_S: Final = 5.0
"""How long an activation waits for its first block: neighbours give up cached prefixes between two of their steps."""
_GAPS: Final = 1.25
"""Address space over bytes in an arena of a pool's own: slots that straddle blocks are skipped (a sixteenth at most),
and the last block is whole."""


def create_buffers(pool: Any) -> None:
    """Replaces ``MHATokenToKVPool._create_buffers_normal``: a pool of Prism's under SGLang's."""
    if pool.kv_cache_layout != "nhd":
        raise refuse(f"KV in the layout {pool.kv_cache_layout}")
    if current_seat().draft_rows is not None:
        create_shared(pool, current_seat())
        return
    layout = memory.KvLayout(
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype_bytes=pool.store_dtype.itemsize,
        tokens_per_slot=pool.page_size,
    )
    place(pool, layout)
    pool.k_buffer, pool.v_buffer = memory.torch_views(pool.prism_group.pool, pool.store_dtype)


def create_shared(pool: Any, seat: Seat) -> None:
    """The same for a model that another guesses for, and then for that one: both have their rows in one slot
    (:mod:`sglang_patches.spec_draft`)."""
    own, guesser = rows_of_pool(pool), seat.draft_rows
    if not seat.kv_groups:
        place(pool, joint_layout(own, guesser))
        pool.k_buffer, pool.v_buffer = own.views(pool.prism_pool, 0)
        return
    if own != guesser:
        raise refuse(f"guesses with {own}, where room was made for {guesser}")
    (group,) = seat.kv_groups
    pool.prism_seat, pool.prism_group, pool.prism_pool = seat, group, group.pool
    pool.k_buffer, pool.v_buffer = own.views(group.pool, group.slot_bytes - own.token_bytes)


def place(pool: Any, layout: memory.KvLayout) -> None:
    """Gives SGLang's ``pool`` a group of ``layout``: ``prism_group``."""
    pool.prism_seat, pool.prism_group = current_seat(), add_group(current_seat(), GroupKind.TOKENS, layout, pool.size)
    pool.prism_pool = pool.prism_group.pool


def add_group(seat: Seat, kind: GroupKind, layout: memory.KvLayout, max_tokens: int) -> KvGroup:
    """The first pool of an activation lies in the worker's arena, whose addresses and lease stay from model to model;
    each further one has an arena of its own, since SGLang makes them one after the other."""
    index = len(seat.kv_groups)
    if index == len(seat.kv_arenas):
        nbytes = int(_GAPS * max_tokens * layout.cell_bytes) + seat.kv_arenas[0].virtual_bytes // 8
        seat.kv_arenas.append(seat.owner.arena(nbytes))
    arena = seat.kv_arenas[index]
    pool = arena.divide(layout, max_tokens=max_tokens, lease_bytes=0, timeout_s=_ROOM_WAIT_S)
    group = KvGroup(kind, pool, max_tokens)
    seat.kv_groups.append(group)
    return group


def current_seat() -> Seat:
    """The seat of the activation that is going on in this process."""
    from sglang.srt.runtime_context import get_server_args

    seat: Seat = get_server_args().prism_seat
    return seat


def restore_kv_scales(model: Any) -> None:
    """After an image was filled: the scales of quantized KV as numbers, which SGLang makes of the loaded ones."""
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            scale = getattr(module, name, None)
            if isinstance(scale, torch.Tensor) and scale.numel() == 1:
                setattr(module, f"{name}_float", float(scale))


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
        HookKind.REPLACE,
        create_buffers,
        ("self",),
        "KV buffers are views over reserved addresses",
    ),
)
