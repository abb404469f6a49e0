"""KV that leaves the engine and comes back: prefixes that are evicted, requests that are retracted, models that leave.

The trees stay SGLang's (:mod:`sglang_patches.kv_move_trees`). Before one drops tokens, and before a retracted request
gives its slots back, what is worth it is stored by content (``Seat.kv``); before waiting requests are admitted, what is
stored of their tokens is brought into new slots and put into the tree, where admission finds it like any cached prefix.
While other requests run that is done beside their steps by a thread, and the request it is for waits for it in its
place of the queue::

    step n:    slots taken, thread begins            step n+k:  verified, in the tree, request admitted
               running requests decode  ...  decode

Whatever is missing, corrupt or would take longer to bring than to compute is computed: a request needs nothing of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from sglang_patches.fair import fair_rounds
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_move_in import KvMoves, without
from sglang_patches.kv_move_paths import evicted_paths, nodes_below, path_of, request_path
from sglang_patches.kv_move_states import has_states, known_state, running_state, state_of
from sglang_patches.kv_move_trees import attach, has_points, why_stays
from sglang_patches.seat import KvStore

log = logging.getLogger(__name__)

_EVICT_S: Final = 0.02
"""A step is held up by about this at most to copy what an eviction drops; what is left then is lost."""
_TIMED_TOKENS: Final = 32
"""Shorter prefills tell more about a step than about tokens."""


def store_of(tree: Any) -> KvStore | None:
    """The seat's store when KV of ``tree`` can move (:func:`~sglang_patches.kv_move_trees.why_stays`)."""
    if why_stays(tree):
        return None
    kvcache = tree.token_to_kv_pool_allocator.get_kvcache()
    seat = getattr(kvcache, "prism_seat", None)
    store: KvStore | None = getattr(seat, "kv", None)
    if seat is not None and store is not None and not store.attached:
        attach(store, tree, seat)
    return store


def keep_evicted(tree: Any, params: Any) -> None:
    """Before ``RadixCache.evict``: what it is about to drop is stored."""
    store = store_of(tree)
    if store is None:
        return
    end_s = time.perf_counter() + _EVICT_S
    for tokens, slots, adapter, first in evicted_paths(tree, params.num_tokens):
        if time.perf_counter() > end_s:
            return
        if store.keep_is_worth(len(tokens) - first):
            store.keep_soon(tokens, slots, adapter or "", first)


def begin_evicting(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    """Around ``UnifiedRadixCache.evict``, which drops nodes one by one, and windows alone."""
    tree.prism_evicting = time.perf_counter() + _EVICT_S
    try:
        return original(tree, params)
    finally:
        tree.prism_evicting = 0.0


def keep_leaf(tree: Any, node: Any, tracker: Any) -> None:
    """Before ``UnifiedRadixCache._evict_device_leaf``: ``node`` is about to be dropped, all that there is of it."""
    store = store_of(tree)
    if store is None or time.perf_counter() > getattr(tree, "prism_evicting", 0.0):
        return
    tokens, slots = path_of(node)
    if store.keep_is_worth(len(node.key)):
        with known_state(tree, slots, _state(tree, node)):
            store.keep_soon(tokens, slots, node.key.extra_key or "", len(tokens) - len(node.key))


def _state(tree: Any, node: Any) -> Any:
    return state_of(node) if has_states(tree) else None


def keep_point(component: Any, node: Any, target: Any = None) -> None:
    """Before ``evict_component`` of windows or states: of ``node`` these alone are dropped, if it is no leaf."""
    tree = component.cache
    store = store_of(tree)
    alone = node.component_data[component.component_type].value is not None and node not in tree.evictable_device_leaves
    if store is None or not alone or time.perf_counter() > getattr(tree, "prism_evicting", 0.0):
        return
    if store.keep_is_worth(len(path_of(node)[0])):
        _keep_point(tree, store, node)


def _keep_point(tree: Any, store: KvStore, node: Any) -> None:
    """What belongs to the point behind ``node`` alone. A state is at one point only, so that the tokens up to there are
    a piece of their own; windows are found at the end of a whole one, too."""
    tokens, slots = path_of(node)
    adapter, state = node.key.extra_key or "", _state(tree, node)
    if not has_states(tree):
        store.keep_point(tokens, slots, adapter)
    elif state is not None:
        with known_state(tree, slots, state):
            store.keep_soon(tokens, slots, adapter, len(tokens) - 1)


def keep_retracted(*, req: Any, req_to_token_pool: Any, tree_cache: Any, **_: Any) -> None:
    """Before ``release_req``: a request that is taken out of the batch pages its KV out, where that is faster than
    computing it again."""
    store = store_of(tree_cache)
    if store is None or req.finished() or req.input_embeds is not None:
        return
    if getattr(req, "skip_radix_cache_insert", False):  # a long one, whose slots are not its KV's
        return
    tokens, slots = request_path(req, req_to_token_pool)
    # The tree has what is before it, and stores it when it drops it; but finds none of it again without its point.
    first = 0 if has_points(tree_cache) else int(req.cache_protected_len)
    if store.keep_is_worth(len(tokens) - first):
        with known_state(tree_cache, slots, running_state(tree_cache, req)):
            store.keep_soon(tokens, slots, req.extra_key or "", first)


def keep_all(scheduler: Any) -> None:
    """The model leaves: store what its requests and its tree hold, what was used last first."""
    tree = scheduler.tree_cache
    store = store_of(tree)
    if store is None:
        return
    moves_of(scheduler, store).close()
    end_s = time.perf_counter() + store.leave_s
    for req in [*scheduler.running_batch.reqs, *_chunked(scheduler)]:
        if req.req_pool_idx is not None and req.input_embeds is None:
            tokens, slots = request_path(req, scheduler.req_to_token_pool)
            if not store.keep_is_worth(len(tokens)):
                continue
            with known_state(tree, slots, running_state(tree, req)):
                store.keep(tokens, slots, req.extra_key or "", 0, end_s - time.perf_counter())
    leaves = [node for node in nodes_below(tree.root_node) if not node.children]
    for node in sorted(leaves, key=lambda n: -n.last_access_time):
        tokens, slots = path_of(node)
        if len(tokens) and store.keep_is_worth(len(tokens)):
            with known_state(tree, slots, _state(tree, node)):
                store.keep(tokens, slots, node.key.extra_key or "", 0, end_s - time.perf_counter())
    _keep_branches(tree, store, end_s)
    store.close()
    scheduler.prism_kv_moves = scheduler.prism_fair = None


def _keep_branches(tree: Any, store: KvStore, end_s: float) -> None:
    """Where sequences go apart others may do so, too, and where a state is they can: what belongs to these points
    alone, where there is such."""
    for node in nodes_below(tree.root_node) if has_points(tree) else ():
        inner = len(node.children) > (0 if has_states(tree) else 1)
        if inner and time.perf_counter() < end_s:
            _keep_point(tree, store, node)


def _chunked(scheduler: Any) -> list[Any]:
    return [] if scheduler.chunked_req is None else [scheduler.chunked_req]


def moves_of(scheduler: Any, store: KvStore) -> KvMoves:
    """The scheduler's, made when they are first asked for."""
    moves: KvMoves | None = getattr(scheduler, "prism_kv_moves", None)
    if moves is None:
        moves = scheduler.prism_kv_moves = KvMoves(scheduler, store)
    return moves


def tell_stays(scheduler: Any) -> None:
    """Once per activation whose KV could be kept but for its kind."""
    seat, why = scheduler.server_args.prism_seat, why_stays(scheduler.tree_cache)
    if seat.kv is None or not why or getattr(scheduler, "prism_kv_stays", None) is seat.kv:
        return
    scheduler.prism_kv_stays = seat.kv
    turns = "; its requests go in order of arrival" if seat.fair else ""
    log.warning("KV of this model stays in its engine and is computed again when it leaves%s: %s", turns, why)


def admit(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Around ``Scheduler.get_new_batch_prefill``: stored KV is brought first; requests whose KV is still coming are
    left out and keep their places in the queue."""
    plan = _admit(original, scheduler, running_batch)
    if plan.batch_to_run is not None:
        scheduler.prism_computed_tokens = computed_tokens(scheduler) + int(plan.batch_to_run.extend_num_tokens or 0)
    return plan


def computed_tokens(scheduler: Any) -> int:
    """Tokens that were prefilled since the activation: prompts, and what was computed again."""
    return int(getattr(scheduler, "prism_computed_tokens", 0))


def _admit(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    store = store_of(scheduler.tree_cache)
    if store is None:
        tell_stays(scheduler)
        return original(scheduler, running_batch)
    now_s = time.perf_counter()
    tokens, began_s = getattr(scheduler, "prism_prefill", (0, now_s))
    if tokens >= _TIMED_TOKENS:
        store.note_prefill(tokens, now_s - began_s)
    store.step()
    moves = moves_of(scheduler, store)
    moves.settle()
    fair = fair_rounds(scheduler, store, moves)
    if fair is None:
        moves.look(running=not running_batch.is_empty())
        plan = without(scheduler, moves.coming, lambda: original(scheduler, running_batch))
    else:
        plan = fair.admit(original, running_batch)
    batch = plan.batch_to_run
    scheduler.prism_prefill = (0 if batch is None else int(batch.extend_num_tokens), time.perf_counter())
    return plan


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.radix_cache.RadixCache.evict",
        HookKind.BEFORE,
        keep_evicted,
        ("self", "params"),
        "prefixes survive their eviction in host memory",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict",
        HookKind.AROUND,
        begin_evicting,
        ("self", "params"),
        "how long storing may hold an eviction up",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf",
        HookKind.BEFORE,
        keep_leaf,
        ("self", "node", "tracker"),
        "prefixes with windows survive their eviction in host memory",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_cache_components.swa_component.SWAComponent.evict_component",
        HookKind.BEFORE,
        keep_point,
        ("self", "node", "target"),
        "and so do windows that go alone",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_cache_components.mamba_component.MambaComponent.evict_component",
        HookKind.BEFORE,
        keep_point,
        ("self", "node", "target"),
        "and states",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.release_req",
        HookKind.BEFORE,
        keep_retracted,
        (
            "req",
            "remaing_req_count",
            "server_args",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "hisparse_coordinator",
            "offload_kv",
        ),
        "a request out of memory is paged out, not computed again",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        HookKind.AROUND,
        admit,
        ("self", "running_batch"),
        "what is stored of a request is brought before it is admitted",
    ),
)
