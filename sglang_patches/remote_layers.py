"""Layers that run in other engines: an engine leads its own requests over a route and serves layers to others.

Nothing of it is in force until the engine gets an order (:class:`prism.remote.orders.ServeLayers`, ``HoldPieces``,
``SetRoute``): then this file's object stands at ``scheduler.prism_remote``. Orders, lost peers and foreign work are
looked at between two steps; while a batch waits for a peer, foreign work is served, so that no engine stands still.

A batch whose peer is lost returns an output that means nothing. Its outcome is dropped, all requests are retracted and
the prefix tree is emptied, since their KV was with the peer; they go on over the next route that is left, from the
tokens they have. Without one they wait for the next order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from prism.core.errors import PrismError
from prism.memory.errors import OutOfMemory
from prism.remote.hub import LinkHub
from prism.remote.link import PeerLink, Received
from prism.remote.messages import FetchKv, Leading, MeasureLink, PeerHello, RunPieces
from prism.remote.orders import GrowRoute, HoldPieces, KvWay, Order, RouteStop, ServeLayers, SetRoute
from prism.remote.state import LayersTaken, RemoteState
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import refuse
from sglang_patches.kv_move_in import without
from sglang_patches.remote_growth import KvTaking, ends_held, grown
from sglang_patches.remote_lead import PeerLost, RouteLeader, Stop
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)

_GREET_S: Final = 10.0
_EVERYTHING: Final = 1 << 30
_STUCK_S: Final = 0.005
"""Whoever takes nothing for so long is doing something else."""
_SENDING_S: Final = 0.1
"""Without a look at commands."""


class RemoteLayers:
    """One engine's: its leader's side, its peer's side, and when each has its turn. Raises :class:`PatchError` for an
    engine whose layers cannot be run apart."""

    def __init__(self, scheduler: Any) -> None:
        _check_engine(scheduler)
        self._scheduler = scheduler
        self._seat: Seat = scheduler.server_args.prism_seat
        self._pieces = ModelPieces(scheduler.tp_worker.model_runner.model)
        self._hub = LinkHub(self._seat.watch, self._seat.unwatch)
        me, model = self._seat.owner.name, self._seat.weights.identity
        self._foreign = ForeignWork(scheduler, self._pieces, me, model, self._seat.lent_owner)
        self._leader = RouteLeader(scheduler, self._pieces, self._wait)
        self._leader.attach()
        self._fallbacks: list[tuple[Stop, ...]] = []
        self._opened: list[PeerLink] = []
        self.fetched_tokens = 0
        """Tokens whose KV, or a part of it, was fetched from peers."""
        self._growing: GrowRoute | None = None
        """Set while what peers run is to be taken over."""
        self._taking: KvTaking | None = None
        """Under way."""
        self._taken: LayersTaken | None = None
        self._stepped_s = time.monotonic()
        self._lacking = ""
        """Why weights do not come."""
        self._declined = 0
        """When so many pieces were here, fetching the KV of those that peers ran took longer than beginning again."""
        if self._seat.first_pieces:
            self._foreign.held = frozenset(self._seat.first_pieces)
        self._stored: Any = None
        """The seat's KV store, while KV of this engine is not all here."""

    @property
    def lost(self) -> bool:
        """The batch that just ran has no result."""
        return bool(self._leader.lost)

    @property
    def stalled(self) -> bool:
        """No route is left: requests wait."""
        return not self._usable(self._leader.route)

    @property
    def state(self) -> RemoteState:
        held, layers = self._foreign.held, self._pieces.layers
        return RemoteState(
            layers=layers,
            held_layers=sum(1 <= piece <= layers for piece in held),
            pieces=sorted(held),
            alone=len(held) == self._pieces.count and not self._leader.remote,
            peers=[link.label or self._leader.names[link] for link in self._leader.peers if not link.closed],
            leaders=self._foreign.leaders,
            taken=self._taken,
        )

    def step(self, orders: Sequence[Order]) -> None:
        """Between two steps of the scheduler."""
        own_s = time.monotonic() - self._stepped_s
        self._pump(0.0)
        for order in orders:
            self._carry_out(order)
        if self._leader.lost or any(link.closed for link in self._leader.peers):
            self._go_on_elsewhere()
        if self._growing is not None and (self._leader.remote or self.stalled):
            self._grow(self._growing)
        if self._idle or not self._leader.remote:  # otherwise it is done while the own batch waits
            self._foreign.serve(self._foreign.waiting)
        self._send(_SENDING_S if self._idle else min(own_s, _SENDING_S))
        self._stepped_s = time.monotonic()

    def serve(self) -> None:
        """The scheduler has nothing to run."""
        self._foreign.serve(self._foreign.waiting)
        self._send(_SENDING_S)

    @property
    def _idle(self) -> bool:
        scheduler = self._scheduler
        return not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.last_batch is None

    # --- messages ---

    def _pump(self, timeout_s: float) -> None:
        self._deal(self._hub.pump(timeout_s))

    def _send(self, most_s: float) -> None:
        """Leaders stand still until they have what they asked for: it is sent for as long as the own step before took,
        so that own requests are half as fast at worst."""
        self._deal(self._hub.push(most_s, _STUCK_S))

    def _deal(self, arrived: Sequence[tuple[PeerLink, Received]]) -> None:
        for link, received in arrived:
            asked = isinstance(received.message, PeerHello | MeasureLink | Leading | RunPieces | FetchKv)
            (self._foreign if asked else self._leader).take(link, received)
        self._foreign.forget_closed()

    def _wait(self, timeout_s: float) -> None:
        """The leader waits for an answer."""
        self._pump(0.0 if self._foreign.waiting else timeout_s)
        self._foreign.serve(1)

    # --- orders ---

    def _carry_out(self, order: Order) -> None:
        error = ""
        try:
            match order:
                case ServeLayers():
                    self._hub.listen(Path(order.path))
                case HoldPieces():
                    self._hold(order)
                case SetRoute():
                    self._growing = None
                    self._set_route(order)
                case GrowRoute():
                    self._stop_taking()
                    self._growing = order
        except Exception as problem:
            log.exception("an order was not carried out")
            error = f"{type(problem).__name__}: {problem}"
        self._seat.ordered(order.number, error)

    def _hold(self, order: HoldPieces) -> None:
        wanted = frozenset(order.pieces)
        if not wanted <= frozenset(range(self._pieces.count)):
            raise ValueError(f"pieces must be in [0, {self._pieces.count}), got {sorted(wanted)}")
        needed = {p for s in self._leader.route if s.link is None for p in range(s.first, s.end)}
        if not needed <= wanted:
            raise ValueError(f"the route runs pieces {sorted(needed)} here; only {sorted(wanted)} are to be kept")
        if wanted != self._foreign.held:
            self._stop_taking()
            self._foreign.drop_all()
            self._seat.weights.hold(self._pieces.model, lambda name: self._pieces.piece_of(name) in wanted)
            self._foreign.held = wanted

    def _set_route(self, order: SetRoute) -> None:
        if not order.routes:
            raise ValueError("a route is needed")
        links: dict[str, tuple[PeerLink, frozenset[int]]] = {}
        routes: list[tuple[Stop, ...]] = []
        problems: list[Exception] = []
        for route in order.routes:
            try:
                for path in {stop.path for stop in route if stop.path} - links.keys():
                    links[path] = self._link_to(path)
                routes.append(self._checked(route, links))
            except (OSError, PeerLost, ValueError) as problem:
                problems.append(problem)
        if not routes:
            self._close_unused()
            raise problems[0]
        for why in problems:
            log.warning("one of %d routes cannot be used: %s", len(order.routes), why)
        self._leader.answer_s = order.answer_s
        self._begin_again()
        self._fallbacks = routes[1:]
        self._use(routes[0])

    def _link_to(self, path: str) -> tuple[PeerLink, frozenset[int]]:
        link = self._hub.connect(Path(path))
        self._opened.append(link)
        slots = self._scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0].shape[0]
        me, model = self._seat.owner.name, self._seat.weights.identity
        return link, self._leader.greet(link, me, model, int(slots), _GREET_S)

    def _checked(
        self, route: Sequence[RouteStop], links: dict[str, tuple[PeerLink, frozenset[int]]]
    ) -> tuple[Stop, ...]:
        """Raises ``ValueError`` unless the route has every piece once, in order, where it is, and the head here."""
        at, stops = 0, []
        for stop in route:
            link, held = links[stop.path] if stop.path else (None, self._foreign.held)
            if stop.first != at or stop.end <= stop.first or not held >= set(range(stop.first, stop.end)):
                where = stop.path or "this engine"
                raise ValueError(f"pieces [{stop.first}, {stop.end}) at {where}, which has {sorted(held)}, after {at}")
            stops.append(Stop(link, stop.first, stop.end))
            at = stop.end
        if at != self._pieces.count or stops[-1].link is not None:
            raise ValueError(f"a route ends with piece {self._pieces.count - 1}, the head, at this engine")
        return tuple(stops)

    # --- routes ---

    def _usable(self, route: tuple[Stop, ...]) -> bool:
        here = {piece for stop in route if stop.link is None for piece in range(stop.first, stop.end)}
        return here <= self._foreign.held and not any(stop.link is not None and stop.link.closed for stop in route)

    def _go_on_elsewhere(self) -> None:
        """A peer is lost."""
        why = self._leader.lost or "; ".join(link.why for link in self._leader.peers if link.closed)
        left = [route for route in self._fallbacks if self._usable(route)]
        self._begin_again()
        if left:
            self._fallbacks = left[1:]
            self._use(left[0])
        log.warning("a peer is lost (%s): %s", why, "over the next route" if left else "requests wait for a route")

    def _use(self, route: tuple[Stop, ...]) -> None:
        self._leader.route = route
        self._close_unused()
        self._leader.tell_peers(self._opened)
        if self._leader.remote and self._stored is None:
            self._stored, self._seat.kv = self._seat.kv, None
        elif not self._leader.remote and self._stored is not None:
            self._seat.kv, self._stored = self._stored, None

    def _grow(self, order: GrowRoute) -> None:
        """Bring the next piece that has arrived (all of them while nothing runs: no step waits for more than one), and
        when none has, take over what is here of what peers run. Without peers the engine goes on alone once it has
        everything."""
        while self._bring_one(order.downwards):
            if not self._idle:
                return
        self._tend()
        if self.stalled:
            self._go_on_alone()
        else:
            self._take_over(order.kv)

    def _tend(self) -> None:
        """Weights that will never come are the end of an engine without peers; its requests go on elsewhere."""
        try:
            self._seat.weights.tend()
        except PrismError as error:
            if self.stalled:
                raise
            if str(error) != self._lacking:
                log.error("the rest of the weights does not come, peers go on running it: %s", error)
            self._lacking = str(error)

    def _bring_one(self, downwards: bool) -> bool:
        """False: nothing that could be brought has arrived."""
        weights, held = self._seat.weights, self._foreign.held
        pieces = range(self._pieces.count)
        order = reversed(pieces) if downwards else pieces
        piece = next((p for p in order if p not in held and weights.arrived(p)), None)
        if piece is None:
            return False
        try:
            weights.bring(self._pieces.model, piece)
        except OutOfMemory as error:
            log.warning("piece %d has no memory yet: %s", piece, error)
            return False
        self._foreign.held = held | {piece}
        return True

    def _take_over(self, way: KvWay) -> None:
        """KV is fetched whenever pieces have come, and requests begin again once only, when all have."""
        if self._taking is None and (found := self._to_take(way)) is not None and found.fetches:
            self._taking = found
        if (kv := self._taking) is None:
            return
        try:
            if not kv.fetch(all_at_once=self._idle):
                return
        except PeerLost as lost:
            log.warning("KV of %d layers is not fetched: %s", kv.layers, lost)
            self._stop_taking()  # the next step goes on elsewhere
            return
        self.fetched_tokens += kv.told.tokens
        self._stop_taking()
        self._grew(grown(self._leader.route, kv.runs), None if kv.nothing else kv.told)

    def _to_take(self, way: KvWay) -> KvTaking | None:
        """What is here and runs at peers. When its KV is better made again, that is done when everything is here."""
        held = self._foreign.held
        runs, whole = ends_held(self._leader.route, held), len(held) == self._pieces.count
        if not runs or (len(held) == self._declined and not whole):
            return None
        kv = KvTaking(self._scheduler, self._leader, runs, self._pieces.layers, way)
        self._declined = 0 if kv.fetches or whole else len(held)
        if whole and not kv.fetches:
            self._begin_again()
            self._grew(grown(self._leader.route, runs), kv.told)
        return kv

    def _grew(self, route: tuple[Stop, ...], told: LayersTaken | None) -> None:
        self._taken = told or self._taken
        if any(stop.link is not None for stop in route):
            self._use(route)
        else:
            self._go_on_alone()

    def _stop_taking(self) -> None:
        """What was fetched until now is of no use unless all was."""
        self._taking = self._leader.here = None

    def _go_on_alone(self) -> None:
        if len(self._foreign.held) == self._pieces.count:
            self._fallbacks = []
            self._use((Stop(None, 0, self._pieces.count),))
            log.info("all weights are here: requests go on in this engine alone")

    def _close_unused(self) -> None:
        """Links of no route any more: what their peers keep for this engine is given back."""
        kept = {id(stop.link) for route in (self._leader.route, *self._fallbacks) for stop in route}
        for link in self._opened:
            if id(link) not in kept:
                link.close("the route leads elsewhere")
        self._opened = [link for link in self._opened if not link.closed]

    def _begin_again(self) -> None:
        """Requests go on from the tokens they have; no KV is left that was made over another route."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._stop_taking()
        scheduler = self._scheduler
        if (moves := getattr(scheduler, "prism_kv_moves", None)) is not None:
            moves.close()
            scheduler.prism_kv_moves = scheduler.prism_fair = None
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler._engine_paused = False
        if not scheduler.server_args.disable_radix_cache:
            scheduler.tree_cache.evict(EvictParams(num_tokens=_EVERYTHING))
        self._leader.lost = ""

    def close(self) -> None:
        """The model leaves."""
        if self._stored is not None:  # what is left in the engine is not all of its KV: nothing of it is to be kept
            _empty(self._scheduler)
            self._seat.kv, self._stored = self._stored, None
        self._leader.detach()
        self._foreign.drop_all()
        self._hub.close()


def _empty(scheduler: Any) -> None:
    scheduler.running_batch.reqs = []
    scheduler.chunked_req = None
    scheduler.tree_cache.reset()


def _check_engine(scheduler: Any) -> None:
    args = scheduler.server_args
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = {
        "overlapped steps (disable_overlap_schedule: true)": scheduler.enable_overlap,
        "tensor parallelism": args.prism_seat.world > 1,
        "LoRA adapters": scheduler.enable_lora,
        "speculative decoding": scheduler.draft_worker is not None,
        "embeddings": not scheduler.is_generation,
        f"KV of {type(kvcache).__name__}": type(kvcache).__name__ != "MHATokenToKVPool",
        f"pages of {args.page_size} tokens": args.page_size != 1,
    }
    for what, is_so in found.items():
        if is_so:
            raise refuse(f"layers in other engines together with {what}", "it with all layers here")


def before_step(scheduler: Any) -> None:
    """Orders, lost peers and foreign work between two steps. Requests that begin again are in neither of the
    scheduler's batches any more."""
    seat: Seat = scheduler.server_args.prism_seat
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    orders = seat.take_orders()
    if remote is None and (orders or seat.first_pieces):
        try:
            remote = scheduler.prism_remote = RemoteLayers(scheduler)
        except Exception as error:
            if seat.first_pieces:
                raise
            for order in orders:
                seat.ordered(order.number, f"{type(error).__name__}: {error}")
            return
    if remote is not None:
        remote.step(orders)


def plan_step(scheduler: Any, plan: Callable[[], Any]) -> Any:
    """``plan()``, with requests held back while no route is left; foreign work when there is nothing to run."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    if remote is None:
        return plan()
    waiting = {req.rid: req for req in scheduler.waiting_queue} if remote.stalled else {}
    found = without(scheduler, waiting, plan)
    if found.batch_to_run is None:
        remote.serve()
    return found


def close_remote(scheduler: Any) -> None:
    """The model leaves: its links and what it kept for others go."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    if remote is not None:
        remote.close()
        scheduler.prism_remote = None


def drop_lost(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around ``Scheduler.process_batch_result``: tokens of a batch that lost its peer are never seen."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    return None if remote is not None and remote.lost else original(scheduler, batch, result)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        HookKind.AROUND,
        drop_lost,
        ("self", "batch", "result"),
        "a batch that lost the peer that ran a part of it has no result",
    ),
)
