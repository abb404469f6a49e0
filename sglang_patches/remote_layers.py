"""Layers that run in other engines: an engine leads its own requests over a route and serves layers to others.

Nothing of it is in force until the engine gets an order (:class:`prism.remote.orders.ServeLayers`, ``HoldPieces``,
``SetRoute``): then this file's object stands at ``scheduler.prism_remote``. Orders, lost peers and foreign work are
looked at between two steps; while a batch waits for a peer, foreign work is served, so that no engine stands still.

What it leads over is in :mod:`sglang_patches.remote_routes`, how it comes to have all layers itself in
:mod:`sglang_patches.remote_growth`.

A batch whose peer is lost returns an output that means nothing. Its outcome is dropped, all requests are retracted and
the prefix tree is emptied, since their KV was with the peer; they go on over the next route that is left, from the
tokens they have. Without one they wait for the next order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prism.remote.hub import LinkHub
from prism.remote.link import PeerLink, Received
from prism.remote.messages import FetchKv, Leading, MeasureLink, PeerHello, RunPieces
from prism.remote.orders import GrowRoute, HoldPieces, Order, ServeLayers, SetRoute
from prism.remote.state import RemoteState
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import refuse
from sglang_patches.kv_move_in import without
from sglang_patches.remote_growth import Growth
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_routes import Routes
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)


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
        self._routes = Routes(
            scheduler, self._pieces, self._hub, self._foreign, self._leader, lambda: self._growth.stop_taking()
        )
        self._growth = Growth(scheduler, self._pieces, self._foreign, self._leader, self._routes)
        if self._seat.first_pieces:
            self._foreign.held = frozenset(self._seat.first_pieces)

    @property
    def lost(self) -> bool:
        """The batch that just ran has no result."""
        return bool(self._leader.lost)

    @property
    def stalled(self) -> bool:
        """No route is left: requests wait."""
        return self._routes.stalled

    @property
    def fetched_tokens(self) -> int:
        """Tokens whose KV, or a part of it, was fetched from peers."""
        return self._growth.fetched_tokens

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
            taken=self._growth.taken,
            parts=self._leader.parts,
        )

    def step(self, orders: Sequence[Order]) -> None:
        """Between two steps of the scheduler."""
        self._pump(0.0)
        for order in orders:
            self._carry_out(order)
        if self._leader.lost or any(link.closed for link in self._leader.peers):
            self._routes.go_on_elsewhere()
        self._growth.go_on(self._idle)
        if self._idle or not self._leader.remote:  # otherwise it is done while the own batch waits
            self._foreign.serve(self._foreign.waiting)

    def serve(self) -> None:
        """The scheduler has nothing to run."""
        self._foreign.serve(self._foreign.waiting)

    @property
    def _idle(self) -> bool:
        scheduler = self._scheduler
        return not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.last_batch is None

    # --- messages ---

    def _pump(self, timeout_s: float) -> None:
        self._deal(self._hub.pump(timeout_s))

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
                    self._growth.end()
                    self._routes.set(order)
                case GrowRoute():
                    self._growth.begin(order)
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
            self._growth.stop_taking()
            self._foreign.drop_all()
            self._seat.weights.hold(self._pieces.model, lambda name: self._pieces.piece_of(name) in wanted)
            self._foreign.held = wanted

    def close(self) -> None:
        """The model leaves."""
        self._routes.close()
        self._leader.detach()
        self._foreign.drop_all()
        self._hub.close()


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
