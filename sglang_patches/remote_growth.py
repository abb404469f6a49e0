"""An engine takes over layers that a peer ran for it: the route that follows, and the KV that is with the peer."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from prism.policy.moving import Leg, Way, choose_way
from prism.remote.orders import KvWay
from prism.remote.state import LayersTaken
from sglang_patches.kv_move_paths import nodes_below, request_path
from sglang_patches.remote_lead import PeerLost, RouteLeader, Stop

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces [first, end) of ``stop``, which are at this engine now."""

    stop: Stop
    first: int
    end: int

    def layers(self, count: int) -> range:
        """Of a model with ``count`` layers."""
        return range(max(self.first - 1, 0), min(self.end - 1, count))


def ends_held(route: Sequence[Stop], held: Set[int]) -> list[PieceRun]:
    """What can be taken over of each stop at a peer: its first and its last pieces, as far as they are in ``held``.
    What lies between pieces that are not would make two stops of one."""
    found: list[PieceRun] = []
    for stop in (stop for stop in route if stop.link is not None):
        first, end = stop.first, stop.end
        while first < end and first in held:
            first += 1
        while end > first and end - 1 in held:
            end -= 1
        found += [PieceRun(stop, *bounds) for bounds in ((stop.first, first), (end, stop.end)) if bounds[0] < bounds[1]]
    return found


def grown(route: Sequence[Stop], runs: Sequence[PieceRun]) -> tuple[Stop, ...]:
    """``route`` with ``runs`` at this engine; neighbours at one engine are one stop."""
    here = {piece for run in runs for piece in range(run.first, run.end)}
    stops: list[Stop] = []
    for stop in route:
        for piece in range(stop.first, stop.end):
            link = None if piece in here else stop.link
            first = stops.pop().first if stops and stops[-1].link is link else piece
            stops.append(Stop(link, first, piece + 1))
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


class KvTaking:
    """The KV of layers that peers ran and that this engine runs from now on: what it takes to fetch it, or to have it
    made again, and which is to be done."""

    def __init__(self, scheduler: Any, leader: RouteLeader, runs: Sequence[PieceRun], count: int, way: KvWay) -> None:
        self._leader, self._runs, self._count = leader, runs, count
        reqs = running(scheduler)
        self._slots = used_slots(scheduler, reqs)
        self._cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.layers = sum(len(run.layers(count)) for run in runs)
        self.nothing = not self.layers or not self._slots
        row_bytes = self._cache.k_buffer[0][0].nbytes + self._cache.v_buffer[0][0].nbytes
        tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
        leg = Leg(len(self._slots) * self.layers * row_bytes, leader.rates.fetch_bytes_s)
        self._choice = choose_way([leg], tokens, leader.rates.prefill_tokens_s)
        shorter = way is KvWay.AUTO and self._choice.way is Way.MOVE
        self.fetches = self.nothing or way is KvWay.FETCH or shorter

    @property
    def told(self) -> LayersTaken:
        estimated_s = self._choice.move_s if self.fetches else self._choice.recompute_s
        return LayersTaken(layers=self.layers, tokens=len(self._slots), fetched=self.fetches, estimated_s=estimated_s)

    def fetch(self) -> bool:
        """Copy it here. False: a peer was lost, and it is to be made again."""
        for run in () if self.nothing else self._runs:
            layers = run.layers(self._count)
            assert run.stop.link is not None
            try:
                k, v = self._leader.fetch(run.stop.link, layers.start, layers.stop, self._slots)
            except PeerLost as lost:
                log.warning("KV of layers [%d, %d) is made again: %s", layers.start, layers.stop, lost)
                self.fetches = False
                return False
            for i, layer in enumerate(layers):
                self._cache.k_buffer[layer][self._slots] = k[i]
                self._cache.v_buffer[layer][self._slots] = v[i]
        return True
