"""An engine takes over layers that a peer ran for it: the route that follows, and the KV that is with the peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from prism.policy.moving import Leg, Way, choose_way
from prism.remote.orders import KvWay
from prism.remote.state import LayersTaken
from sglang_patches.kv_move_paths import nodes_below, request_path, slots_of
from sglang_patches.remote_asking import WantedKv
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_ranks import Ranks
from sglang_patches.remote_rows import RowShape, slot_count, write_rows
from sglang_patches.remote_stops import RoutePeer, Stop

SLICE_S: Final = 0.01
"""Streams are to stand still for so long at a time while KV is fetched, or for as long as a step takes over the route,
if that is more: many small slices between long steps would not end before those requests do."""


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces [first, end) of ``stop``, which are at this engine now."""

    stop: Stop
    first: int
    end: int

    @property
    def peer(self) -> RoutePeer:
        assert self.stop.peer is not None
        return self.stop.peer

    def layers(self, count: int) -> range:
        """Of a model with ``count`` layers."""
        return range(max(self.first - 1, 0), min(self.end - 1, count))


def ends_held(route: Sequence[Stop], held: Set[int]) -> list[PieceRun]:
    """What can be taken over of each stop at a peer: its first and its last pieces, as far as they are in ``held``.
    What lies between pieces that are not would make two stops of one."""
    found: list[PieceRun] = []
    for stop in (stop for stop in route if stop.peer is not None):
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
            peer = None if piece in here else stop.peer
            first = stops.pop().first if stops and stops[-1].peer is peer else piece
            stops.append(Stop(peer, first, piece + 1))
    return tuple(stops)


def running(scheduler: Any) -> list[Any]:
    """Requests that have KV."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    found = [req for batch in batches if batch is not None for req in batch.reqs]
    found += [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return list({req.rid: req for req in found if not req.finished() and req.req_pool_idx is not None}.values())


def used_slots(scheduler: Any, reqs: Sequence[Any]) -> Any:
    """All slots whose KV may be read again, of requests and of the prefix tree, as a tensor."""
    parts = [torch.from_numpy(request_path(req, scheduler.req_to_token_pool)[1]) for req in reqs]
    if not scheduler.server_args.disable_radix_cache:
        parts += [slots_of(node).cpu() for node in nodes_below(scheduler.tree_cache.root_node)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).long().unique()


class KvTaking:
    """The KV of layers that peers ran and that this engine is to run: what it takes to fetch it, or to have it made
    again, and which is to be done.

    It is fetched a slice at a time between two steps, over the route as it is, so that no stream stands still for all
    of it; a slot that is written meanwhile is fetched again. The last slice is the first one that leaves nothing
    (pre-copy, as when virtual machines move; lambda-Scale 4.4 and BlitzScale stop for the whole)."""

    def __init__(
        self,
        scheduler: Any,
        leader: RouteLeader,
        runs: Sequence[PieceRun],
        count: int,
        way: KvWay,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._leader, self.runs, self._count = scheduler, leader, runs, count
        self._ranks, self._clock = ranks, clock
        reqs = running(scheduler)
        slots = used_slots(scheduler, reqs)
        self._cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.layers = sum(len(run.layers(count)) for run in runs)
        self.nothing = not self.layers or not len(slots)
        row = RowShape.of(self._cache)
        self._row_bytes = row.nbytes * (ranks.world if row.dealt else 1)
        tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
        self._choice = choose_way(self._legs(len(slots)), tokens, leader.prefill_tokens_s)
        shorter = way is KvWay.AUTO and self._choice.way is Way.MOVE
        self.fetches = bool(ranks.same(int(self.nothing or way is KvWay.FETCH or shorter)))
        self._tokens, self._slice_s = len(slots), 0.0
        self._left, self._times = len(slots) + 1, 1
        self._last, self._put_s = 0, 0.0
        """Slots of the last slice, and what it took to put one where it belongs here."""
        if self.fetches:
            leader.here = torch.zeros(slot_count(self._cache), dtype=torch.bool)

    def _legs(self, slots: int) -> list[Leg]:
        found = []
        for run in self.runs:
            if layers := len(run.layers(self._count)):
                rate = run.peer.rate
                found.append(Leg(slots * layers * self._row_bytes, rate.bytes_s, rate.fixed_s))
        return found

    @property
    def told(self) -> LayersTaken:
        estimated_s = self._slice_s if self.fetches else self._choice.recompute_s
        return LayersTaken(layers=self.layers, tokens=self._tokens, fetched=self.fetches, estimated_s=estimated_s)

    def fetch(self, all_at_once: bool) -> bool:
        """Copy a slice here, or all of it; whether nothing is left. Raises :class:`PeerLost`."""
        if self.nothing:
            return True
        slots = used_slots(self._scheduler, running(self._scheduler))
        left = slots[~self._leader.here[slots]]
        if len(left) >= self._left:
            self._times *= 2  # steps write more than one slice brings
        self._left, self._tokens = len(left), len(slots)
        part = left if all_at_once else left[: self._ranks.same(self._most)]
        if len(part):
            estimated_s = sum(leg.estimated_s for leg in self._legs(len(part))) + len(part) * self._put_s
            self._slice_s = max(self._slice_s, estimated_s)
            self._copy(part)
            self._last, self._leader.here[part] = len(part), True
        return len(part) == len(left)

    @property
    def _most(self) -> int:
        """Slots of a slice. One that brings little more than its question costs would only prolong it all; and what is
        known of the link was measured with little, which came out of caches: the first is half as long, and each at
        most twice as long as the one before."""
        legs = self._legs(1)
        fixed_s = sum(leg.fixed_s for leg in legs)
        slot_s = sum(leg.estimated_s for leg in legs) - fixed_s + self._put_s
        limit_s = max(SLICE_S, self._leader.step_s if self._last else self._leader.step_s / 2)
        most = self._times * int(max(limit_s - fixed_s, fixed_s) / slot_s)
        return max(1, min(most, 2 * self._last) if self._last else most)

    def _copy(self, slots: Any) -> None:
        wanted = [WantedKv(run.peer, layers) for run in self.runs if (layers := run.layers(self._count))]
        found = self._leader.asking.fetch(wanted, slots.tolist())
        began_s = self._clock()
        for one, parts in zip(wanted, found, strict=True):
            write_rows(self._cache, one.layers, slots, parts)
        self._put_s = (self._clock() - began_s) / len(slots)
