"""The routes of an engine that leads: which one it follows, which are left when a peer is lost, and the peers' links.

::

    SetRoute --greet peers, check--> routes --first usable--> followed --peer lost--> next usable | requests wait
                                                                 |
                                                                 +--grown (remote_taking)--> ... --> alone
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prism.remote.hub import LinkHub
from prism.remote.link import PeerLink
from prism.remote.orders import RouteStop, SetRoute
from sglang_patches.graphs import Graphs
from sglang_patches.remote_asking import PeerGreeting
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_questions import PeerLost
from sglang_patches.remote_ranks import Ranks, RanksOutcome
from sglang_patches.remote_rows import slot_count
from sglang_patches.remote_stops import RoutePeer, Stop
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)

_GREET_S: Final = 10.0
_GREET_MORE_S: Final = 1.0
"""For peers of routes that are only fallbacks: own requests stand still meanwhile."""
_EVERYTHING: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Greeted:
    """A path of an order: the peer there and its pieces, or what is wrong with it."""

    peer: RoutePeer | None
    pieces: Sequence[int]
    problem: Exception | None = None


_HERE: Final = _Greeted(None, ())


def _as_told(path: str, numbers: Iterator[int]) -> _Greeted:
    """By rank 0: one more than there are pieces at the peer, and the pieces; 0: it was not greeted."""
    if not (count := next(numbers)):
        return _Greeted(None, (), PeerLost(f"{path} was not greeted"))
    return _Greeted(RoutePeer(None), list(itertools.islice(numbers, count - 1)))


class Routes:
    """Of one engine. ``begins_again`` is called before its requests begin again; it returns those that are in none of
    SGLang's batches."""

    def __init__(
        self,
        scheduler: Any,
        pieces: ModelPieces,
        hub: LinkHub,
        foreign: ForeignWork,
        leader: RouteLeader,
        ranks: Ranks,
        begins_again: Callable[[], list[Any]],
    ) -> None:
        self._scheduler, self._pieces, self._hub = scheduler, pieces, hub
        self._foreign, self._leader, self._ranks, self._begins_again = foreign, leader, ranks, begins_again
        self._seat: Seat = scheduler.server_args.prism_seat
        self._fallbacks: list[tuple[Stop, ...]] = []
        self.peers: list[RoutePeer] = []
        """Of all routes, the same on all ranks."""
        self._graphs = Graphs(scheduler.tp_worker.model_runner)
        self._stranded: tuple[Stop, ...] | None = None
        """A route with a lost peer, whose requests wait."""
        self._stored: Any = None
        """The seat's KV store, while KV of this engine is not all here."""

    @property
    def stalled(self) -> bool:
        """No route is left: requests wait."""
        return not self._usable(self._leader.route)

    def set(self, order: SetRoute) -> None:
        """Follow the first route of ``order`` that can be used. Raises what is wrong with the first when none can."""
        if not order.routes:
            raise ValueError("a route is needed")
        known = self._greet_all(order.routes)
        routes: list[tuple[Stop, ...]] = []
        problems: list[Exception] = []
        for route in order.routes:
            try:
                routes.append(self._checked(route, known))
            except (OSError, PeerLost, ValueError) as problem:
                problems.append(problem)
        if not routes:
            self._close_unused()
            raise problems[0]
        for why in problems:
            log.warning("one of %d routes cannot be used: %s", len(order.routes), why)
        self._leader.asking.answer_s, self._leader.cuts = order.answer_s, not order.whole_prefills
        self.begin_again()
        self._fallbacks = routes[1:]
        self.use(routes[0])

    def _greet_all(self, routes: Sequence[Sequence[RouteStop]]) -> dict[str, _Greeted]:
        """Peers by path, or what is wrong with them, on all ranks."""
        known: dict[str, _Greeted] = {}

        def greet() -> RanksOutcome:
            numbers: list[int] = []
            limit_s = _GREET_S
            greeted = {path: self._greet(path) for path in _paths(stop for route in routes for stop in route)}
            for route in routes:
                for path in [path for path in _paths(route) if path not in known]:
                    known[path] = found = self._greeted(greeted[path], limit_s)
                    numbers += [1 + len(found.pieces) if found.peer else 0, *found.pieces]
                if all(known[path].peer for path in _paths(route)):
                    limit_s = _GREET_MORE_S
            return RanksOutcome(numbers)

        numbers = iter(self._ranks.together(greet).numbers)
        for path in _paths(stop for route in routes for stop in route):
            if not self._ranks.leads:
                known[path] = _as_told(path, numbers)
        self.peers += [found.peer for found in known.values() if found.peer is not None]
        return known

    def _greet(self, path: str) -> PeerGreeting | OSError:
        try:
            peer = RoutePeer(self._hub.connect(Path(path)))
        except OSError as error:
            return error
        return self._leader.asking.greet(peer, *self._introduction())

    def _introduction(self) -> tuple[str, str, int]:
        """Who this engine is, the model, and how many slots it has."""
        slots = slot_count(self._scheduler.token_to_kv_pool_allocator.get_kvcache())
        return self._seat.owner.name, self._seat.weights.identity, slots

    def greet_ahead(self, link: PeerLink) -> None:
        """A connection was handed over, for a route that is to come."""
        self._leader.asking.greet_ahead(RoutePeer(link), *self._introduction())

    def _greeted(self, greeting: PeerGreeting | OSError, within_s: float) -> _Greeted:
        if isinstance(greeting, OSError):
            return _Greeted(None, (), greeting)
        try:
            pieces = self._leader.asking.welcomed(greeting, within_s)
        except PeerLost as lost:
            greeting.peer.close("it was not greeted")
            return _Greeted(None, (), lost)
        if greeting.ahead:  # whoever gives the order was told since; what it does not have it refuses
            pieces = frozenset(range(self._pieces.count))
        return _Greeted(greeting.peer, sorted(pieces))

    def _checked(self, route: Sequence[RouteStop], known: dict[str, _Greeted]) -> tuple[Stop, ...]:
        """Raises ``ValueError`` unless the route has every piece once, in order, where it is, and the head here, and
        the embedding of a model that takes images, which are here."""
        at, stops = 0, []
        for stop in route:
            there = known[stop.path] if stop.path else _HERE
            if there.problem is not None:
                raise there.problem
            held = self._foreign.held if there.peer is None else frozenset(there.pieces)
            if stop.first != at or stop.end <= stop.first or not held >= set(range(stop.first, stop.end)):
                where = stop.path or "this engine"
                raise ValueError(f"pieces [{stop.first}, {stop.end}) at {where}, which has {sorted(held)}, after {at}")
            stops.append(Stop(there.peer, stop.first, stop.end))
            at = stop.end
        if at != self._pieces.count or stops[-1].peer is not None:
            raise ValueError(f"a route ends with piece {self._pieces.count - 1}, the head, at this engine")
        if stops[0].peer is not None and self._scheduler.model_config.is_multimodal:
            raise ValueError("a model that takes images has them embedded where its requests are")
        return tuple(stops)

    def _usable(self, route: tuple[Stop, ...]) -> bool:
        here = {piece for stop in route if stop.peer is None for piece in range(stop.first, stop.end)}
        return here <= self._foreign.held and not any(stop.peer is not None and stop.peer.lost for stop in route)

    def go_on_elsewhere(self) -> None:
        """A peer is lost. Where no route is left, one may become usable with the pieces that arrive."""
        left = [route for route in self._fallbacks if self._usable(route)]
        if not left and not self._leader.lost and self._leader.route is self._stranded:
            return
        why = self._leader.lost or "; ".join(peer.why for peer in self._leader.peers if peer.lost)
        self._stranded = self._leader.route
        self.begin_again()
        if left:
            self._fallbacks = left[1:]
            self.use(left[0])
        log.warning("a peer is lost (%s): %s", why, "over the next route" if left else "requests wait for a route")

    def use(self, route: tuple[Stop, ...]) -> None:
        """Follow ``route`` from the next step on. KV goes into no store while a part of it is with peers."""
        self._leader.route = route
        self._graphs.allow(not self._leader.remote)
        self._close_unused()
        self._leader.tell_peers(self.peers)
        if self._leader.remote and self._stored is None:
            self._stored, self._seat.kv = self._seat.kv, None
        elif not self._leader.remote and self._stored is not None:
            self._seat.kv, self._stored = self._stored, None

    def go_on_alone(self) -> None:
        """If all pieces are here."""
        if len(self._foreign.held) == self._pieces.count:
            self._fallbacks = []
            self.use((Stop(None, 0, self._pieces.count),))
            self._hub.drop_handed()
            log.info("all weights are here: requests go on in this engine alone")

    def _close_unused(self) -> None:
        """Links of no route any more: what their peers keep for this engine is given back."""
        kept = {id(stop.peer) for route in (self._leader.route, *self._fallbacks) for stop in route}
        for peer in self.peers:
            if id(peer) not in kept:
                peer.close("the route leads elsewhere")
        self.peers = [peer for peer in self.peers if not peer.lost]

    def begin_again(self) -> None:
        """Requests go on from the tokens they have; no KV is left that was made over another route."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        scheduler, elsewhere = self._scheduler, self._begins_again()
        scheduler.running_batch.reqs = list(dict.fromkeys([*scheduler.running_batch.reqs, *elsewhere]))
        self._leader.ready = None
        if (moves := getattr(scheduler, "prism_kv_moves", None)) is not None:
            moves.close()
            scheduler.prism_kv_moves = scheduler.prism_fair = None
        ahead, scheduler.enable_overlap = scheduler.enable_overlap, False  # nothing is in flight
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.enable_overlap, scheduler._engine_paused = ahead, False
        if not scheduler.server_args.disable_radix_cache:
            scheduler.tree_cache.evict(EvictParams(num_tokens=_EVERYTHING))
        self._leader.lost = ""

    def close(self) -> None:
        """The model leaves."""
        if self._stored is not None:  # what is left in the engine is not all of its KV: nothing of it is to be kept
            _empty(self._scheduler)
            self._seat.kv, self._stored = self._stored, None


def _paths(stops: Iterable[RouteStop]) -> list[str]:
    return list(dict.fromkeys(stop.path for stop in stops if stop.path))


def _empty(scheduler: Any) -> None:
    scheduler.running_batch.reqs = []
    scheduler.chunked_req = None
    scheduler.tree_cache.reset()
