"""An engine takes over layers that a peer ran for it: the route that follows, and the KV that is with the peer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from prism.remote.orders import KvWay
from sglang_patches.kv_move_paths import nodes_below, request_path
from sglang_patches.remote_lead import PeerLost, RouteLeader, Stop
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)


def grown(route: tuple[Stop, ...], end: int) -> tuple[Stop, ...]:
    """``route`` with all pieces below ``end`` at this engine; neighbours at one engine are one stop."""
    stops: list[Stop] = []
    for stop in (Stop(None, 0, end), *route):
        first = stop.first if stop.first == 0 and not stops else max(stop.first, end)
        if first >= stop.end:
            continue
        if stops and stops[-1].link is stop.link:
            stops[-1] = Stop(stop.link, stops[-1].first, stop.end)
        else:
            stops.append(Stop(stop.link, first, stop.end))
    return tuple(stops)


def running(scheduler: Any) -> list[Any]:
    """Requests that have KV."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    found = [req for batch in batches if batch is not None for req in batch.reqs]
    found += [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return list({req.rid: req for req in found if not req.finished() and req.req_pool_idx is not None}.values())


def used_slots(scheduler: Any, reqs: Sequence[Any]) -> list[int]:
    """All slots whose KV may be read again: of requests and of the prefix tree."""
    parts = [torch.from_numpy(request_path(req, scheduler.req_to_token_pool)[1]) for req in reqs]
    if not scheduler.server_args.disable_radix_cache:
        parts += [node.value.cpu() for node in nodes_below(scheduler.tree_cache.root_node)]
    slots: list[int] = torch.cat(parts).unique().tolist() if parts else []
    return slots


def take_kv(scheduler: Any, leader: RouteLeader, stop: Stop, layers: range, way: KvWay) -> int | None:
    """Fetch the KV of ``layers`` from the peer of ``stop``, which ran them: the number of tokens. None: it is to be
    made again, since that is shorter, or ``way`` says so, or the peer is lost."""
    seat: Seat = scheduler.server_args.prism_seat
    reqs = running(scheduler)
    slots = used_slots(scheduler, reqs)
    if not layers or not slots:
        return 0
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    nbytes = len(slots) * len(layers) * (kvcache.k_buffer[0][0].nbytes + kvcache.v_buffer[0][0].nbytes)
    tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
    pays = seat.fetching_pays(nbytes, leader.rates.fetch_bytes_s, tokens, leader.rates.prefill_tokens_s)
    if way is KvWay.RECOMPUTE or (way is KvWay.AUTO and not pays):
        return None
    assert stop.link is not None
    try:
        k, v = leader.fetch(stop.link, layers.start, layers.stop, slots)
    except PeerLost as lost:
        log.warning("KV of layers [%d, %d) is made again: %s", layers.start, layers.stop, lost)
        return None
    for i, layer in enumerate(layers):
        kvcache.k_buffer[layer][slots] = k[i]
        kvcache.v_buffer[layer][slots] = v[i]
    return len(slots)
