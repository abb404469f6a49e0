"""Mamba and linear attention (Qwen3-Next, Nemotron-H, Granite-4-H, Falcon-H1, Kimi-Linear): beside the attention
layers' KV a state per request, and per cached prefix, which does not grow.

A state's tensors of all layers lie in one slot of a group of their own::

    slot 0 (padding)                     slot 1
    | temporal L0 L1 .. | conv0 L0 .. | pad | temporal L0 L1 .. | ...

SGLang calls this its page-major layout and has kernels that read it (Triton's); it is switched on for these models.
Nothing in SGLang's admission asks for states: what is let in is stopped here while states are not covered by the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from torch.overrides import TorchFunctionMode

from prism import memory
from prism.memory import GroupKind, KvGroup
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_group_lease import STATES_PER_REQUEST, GroupLease
from sglang_patches.kv_guard import check_pools, refuse
from sglang_patches.kv_lease import KvLease
from sglang_patches.kv_pool import add_group, create_buffers, current_seat
from sglang_patches.kv_returns import to_device
from sglang_patches.seat import Seat

_ALIGN: Final = 256
_made: list[KvGroup] = []
"""The group whose tensors SGLang is about to build."""


def make_pools(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """Around ``KVCacheConfigurator._init_pools``: the layout above for models that have states, and one lease over all
    groups; :func:`~sglang_patches.kv_guard.check_pools` looks whether all pools are in the account."""
    if configurator.mambaish_config is not None:
        if configurator.is_hybrid_swa:
            raise refuse("states beside sliding windows")
        configurator.server_args.override("prism.states", enable_page_major_kv_layout=True)
    pools = check_pools(original, configurator, **kwargs)
    pools.token_to_kv_pool.prism_seat = configurator.server_args.prism_seat  # of those that are made of others, too
    join_lease(pools, configurator.server_args.prism_seat)
    return pools


def profile_available_bytes(configurator: Any, pre_model_load_memory: float) -> int:
    """Replaces ``KVCacheConfigurator._profile_available_bytes``: address space, since pages come on demand. SGLang
    divides memory between states and tokens once and for all; here states may have all of it, and tokens all but what
    one request's states take."""
    seat: Seat = configurator.server_args.prism_seat
    available_bytes = seat.kv_capacity_bytes
    if configurator.mambaish_config is None:
        return available_bytes
    params = configurator.mambaish_config.mamba2_cache_params
    slot_bytes = _state_layout(params, len(params.layers), seat.owner.page_bytes).cell_bytes
    if configurator.server_args.max_mamba_cache_size is None:
        most = max(1, available_bytes // slot_bytes)
        configurator.server_args.override("prism.states", max_mamba_cache_size=most)
    return max(0, available_bytes - STATES_PER_REQUEST * slot_bytes)


def _state_layout(params: Any, layers: int, page_bytes: int) -> memory.KvLayout:
    return memory.state_layout(sum(nbytes for _, nbytes in _places(layers, params.shape, params.dtype)), page_bytes)


def make_states(original: Callable[..., Any], pool: Any, **kwargs: Any) -> None:
    """Around ``MambaPool.__init__``: its tensors are views of a group's slots."""
    if kwargs.get("enable_linear_replayssm") or kwargs.get("enable_gdn_replayssm_spec"):
        raise refuse("states with replay buffers (ReplaySSM)", "the model without them")
    if kwargs.get("speculative_num_draft_tokens") is not None:
        raise refuse("states of speculative decoding", "the model without it")
    params, layers, seat = kwargs["cache_params"], len(kwargs["mamba_layer_ids"]), current_seat()
    layout = _state_layout(params, layers, seat.owner.page_bytes)
    group = pool.prism_group = add_group(seat, GroupKind.STATES, layout, kwargs["size"])
    _made[:] = [group]
    with _NoBuffer():
        original(pool, **(kwargs | {"envelope_layout": True}))


class _NoBuffer(TorchFunctionMode):  # type: ignore[misc]
    """The bytes that SGLang would cut its views from are not allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.uint8:
            return torch.empty(0, dtype=torch.uint8)
        return func(*args, **kwargs)


def state_views(
    raw: Any,
    *,
    layer_num: int,
    conv_state_shapes: Sequence[Sequence[int]],
    conv_dtype: torch.dtype,
    temporal_state_shape: Sequence[int],
    temporal_dtype: torch.dtype,
    max_slots: int,
    anchor_bytes: int = 0,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Replaces ``build_page_major_mamba_views``: ``[layers, slots, *shape]`` of each tensor, strided by slots."""
    (group,) = _made
    flat = torch.from_dlpack(group.pool.memory())
    start_bytes = group.address_of(0) - group.pool.address
    shapes = [(tuple(temporal_state_shape), temporal_dtype), *((tuple(s), conv_dtype) for s in conv_state_shapes)]
    views, offset_bytes = [], start_bytes
    for shape, dtype in shapes:
        item, inner = dtype.itemsize, prod(shape)
        size = (layer_num, group.pool.slot_ids, *shape)
        strides = (inner, group.slot_bytes // item, *torch.empty(shape, device="meta").stride())
        views.append(flat.view(dtype).as_strided(size, strides, offset_bytes // item))
        offset_bytes += _aligned(layer_num * inner * item)
    return views[1:], views[0]


def _places(layers: int, shape: Any, dtype: Any) -> list[tuple[tuple[int, ...], int]]:
    """The tensors of a state in the order in which they lie, and the bytes each takes in a slot."""
    tensors = [(tuple(shape.temporal), dtype.temporal), *((tuple(conv), dtype.conv) for conv in shape.conv)]
    return [(one, _aligned(layers * prod(one) * kind.itemsize)) for one, kind in tensors]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def create_page_major_buffers(pool: Any) -> None:
    """Replaces ``PageMajorMHATokenToKVPool._create_buffers``, which the attention layers of these models have: the same
    views with a dimension for the page, of which each has one token."""
    if pool.page_size != 1:
        raise refuse("states beside KV pages of more than one token", "the model with page_size 1")
    pool.kv_cache_layout = "nhd"
    create_buffers(pool)
    pool.kv_cache_layout = "page_major_layer_major"
    pool.k_buffer = [view.unsqueeze(1) for view in pool.k_buffer]
    pool.v_buffer = [view.unsqueeze(1) for view in pool.v_buffer]
    both = pool.k_buffer + pool.v_buffer
    pool.k_data_ptrs, pool.v_data_ptrs, pool.data_ptrs = (
        torch.tensor([view.data_ptr() for view in views], dtype=torch.uint64, device=pool.device)
        for views in (pool.k_buffer, pool.v_buffer, both)
    )
    strides = [view.stride(0) * view.dtype.itemsize for view in both]
    pool.data_strides = torch.tensor(strides, device=pool.device)


class ElasticStateAllocator(MambaSlotAllocator):  # type: ignore[misc]
    """Slots of the group of states. :meth:`available_size` is what is not in use, leased or not, as SGLang's checks
    want it; what can be had for certain says :meth:`schedulable_available_size`."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.group = next(group for group in reversed(current_seat().kv_groups) if group.kind is GroupKind.STATES)
        self.part = GroupLease(self.group)
        self.promised = 0
        """States that requests let in since the last batch may still take."""
        self.free_slots = torch.empty((0,), dtype=torch.int64)  # SGLang's census of leaked slots reads it

    def available_size(self) -> int:
        return self.size - self.part.used()

    def schedulable_available_size(self) -> int:
        return self.part.available()

    def room_for_one(self, tree: Any) -> bool:
        """Whether a request more could start: its own state, and those that the prefix cache takes from it."""
        needed = STATES_PER_REQUEST if tree.supports_mamba() else 1
        return self.part.available() + self.part.evictable(tree) - self.promised >= needed

    def alloc_group_begin(self, num_reqs: int) -> None:
        """A batch is being made. Slots are taken one by one: that costs no more here."""
        self.promised = 0

    def alloc_group_end(self) -> None:
        pass

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.part.available():
            return None
        return to_device(torch.from_numpy(self.group.pool.alloc(need_size)), self.device)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() > 0:
            self.group.pool.free(free_index.to("cpu", torch.int64))

    def clear(self) -> None:
        self.group.pool.reset()


def join_lease(pools: Any, seat: Seat) -> None:
    """One lease over the attention layers' group and that of the states."""
    states = getattr(pools.req_to_token_pool, "mamba_allocator", None)
    if states is None:
        return
    tokens = pools.token_to_kv_pool_allocator
    tokens.lease = KvLease([tokens.part, states.part], seat)


def match_without_copy(original: Callable[..., Any], req: Any, tree_cache: Any = None, cow_mamba: Any = None) -> Any:
    """Around ``Req.init_next_round_input``, which takes a state for a request whose prefix has one: not while there
    is no room for the request."""
    takes_state = tree_cache is not None and tree_cache.supports_mamba() and req.mamba_pool_idx is None
    if takes_state and not tree_cache.req_to_token_pool.mamba_allocator.room_for_one(tree_cache):
        cow_mamba = False
    return original(req, tree_cache, cow_mamba)


def admit(original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: Any) -> Any:
    """Around ``PrefillAdder.add_one_req``: a request starts only if its states are covered."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    states = getattr(adder.tree_cache.req_to_token_pool, "mamba_allocator", None)
    if states is None:
        return original(adder, req, has_chunked_req, truncation_align_size)
    if req.mamba_pool_idx is None and not states.room_for_one(adder.tree_cache):
        return AddReqResult.NO_TOKEN
    result = original(adder, req, has_chunked_req, truncation_align_size)
    if any(added is req for added in adder.can_run_list):
        states.promised += STATES_PER_REQUEST - (req.mamba_pool_idx is not None)
    return result


def states_info(observer: Any) -> Any:
    """Replaces ``SchedulerPoolStatsObserver._get_mamba_token_info``: an unleased slot is free, not leaked."""
    from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

    tokens, states = observer.token_to_kv_pool_allocator, observer.req_to_token_pool.mamba_allocator
    tree = observer.tree_cache
    cached = tree.supports_mamba() and tree.is_tree_cache()
    free, free_states = tokens.unleased_size(), states.available_size()
    evictable = tree.full_evictable_size() if cached else 0
    evictable_states = tree.mamba_evictable_size() if cached else 0
    used, used_states = tokens.size - free - evictable, states.size - free_states - evictable_states
    return PoolStats(
        is_hybrid_ssm=True,
        full_num_used=used,
        full_token_usage=used / tokens.size,
        full_available_size=free,
        full_evictable_size=evictable,
        mamba_num_used=used_states,
        mamba_usage=used_states / states.size,
        mamba_available_size=free_states,
        mamba_evictable_size=evictable_states,
    )


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
HOOKS = (
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        HookKind.REPLACE,
        profile_available_bytes,
        ("self", "pre_model_load_memory"),
        "the pools' sizes are address space, not memory",
    ),
    Hook(
        f"{_CONFIGURATOR}._init_pools",
        HookKind.AROUND,
        make_pools,
        ("self", "sizes", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "only pools in the account; one lease over all of them",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
        HookKind.AROUND,
        make_states,
        (
            "self",
            "size",
            "spec_state_size",
            "cache_params",
            "mamba_layer_ids",
            "device",
            "enable_memory_saver",
            "speculative_num_draft_tokens",
            "speculative_eagle_topk",
            "enable_linear_replayssm",
            "linear_replayssm_cache_len",
            "envelope_layout",
            "enable_gdn_replayssm_spec",
        ),
        "states are views over reserved addresses",
    ),
    Hook(
        "sglang.srt.mem_cache.layout.page_major.build_page_major_mamba_views",
        HookKind.REPLACE,
        state_views,
        (
            "raw",
            "layer_num",
            "conv_state_shapes",
            "conv_dtype",
            "temporal_state_shape",
            "temporal_dtype",
            "max_slots",
            "anchor_bytes",
        ),
        "slots of states are padded to pages",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.PageMajorMHATokenToKVPool._create_buffers",
        HookKind.REPLACE,
        create_page_major_buffers,
        ("self",),
        "KV beside states is views over reserved addresses",
    ),
    Hook(
        "sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator",
        HookKind.REPLACE,
        ElasticStateAllocator,
        ("self", "size", "device"),
        "states map and unmap pages",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        HookKind.AROUND,
        match_without_copy,
        ("self", "tree_cache", "cow_mamba"),
        "a request that cannot start takes no state",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        HookKind.AROUND,
        admit,
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        "states are covered before a request starts",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_mamba_token_info",
        HookKind.REPLACE,
        states_info,
        ("self",),
        "the leak check counts virtual slots",
    ),
)
