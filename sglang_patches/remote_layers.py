"""Layers that run in other engines: an engine leads its own requests over a route and serves layers to others.

Nothing of it is in force until the engine gets an order (:class:`prism.remote.orders.ServeLayers`, ``HoldPieces``,
``SetRoute``): then this file's object stands at ``scheduler.prism_remote``. Orders, lost peers and foreign work are
looked at between two steps; while a batch waits for a peer, foreign work is served, so that no engine stands still.

What it leads over is in :mod:`sglang_patches.remote_routes`, how it comes to have all layers itself in
:mod:`sglang_patches.remote_growth`.

A batch whose peer is lost returns an output that means nothing. Its outcome is dropped, all requests are retracted and
the prefix tree is emptied, since their KV was with the peer; they go on over the next route that is left, from the
tokens they have. Without one they wait for the next order.

Ranks of a tensor-parallel engine do all of this at the same steps (:mod:`sglang_patches.remote_ranks`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prism.core.errors import PrismError
from prism.remote.hub import LinkHub
from prism.remote.link import PeerLink, Received
from prism.remote.messages import FetchKv, Leading, MeasureLink, PeerHello, RunPieces, RunRest
from prism.remote.orders import GrowRoute, HoldPieces, Order, ServeLayers, SetRoute
from prism.remote.state import RemoteState
from sglang_patches.kv_guard import refuse
from sglang_patches.remote_ahead import RunAhead
from sglang_patches.remote_along import OwnSteps
from sglang_patches.remote_asking import PeerAsking
from sglang_patches.remote_growth import LOOK_S, Growth
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_ranks import Ranks, RanksApart, RanksOutcome
from sglang_patches.remote_relay import Relay
from sglang_patches.remote_routes import Routes
from sglang_patches.remote_rows import strange_rows
from sglang_patches.remote_under_way import MOST, BatchesUnderWay
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)


class RemoteLayers:
    """One engine's: its leader's side, its peer's side, and when each has its turn. Raises :class:`PatchError` for an
    engine whose layers cannot be run apart."""

    def __init__(self, scheduler: Any) -> None:
        _check_engine(scheduler)
        self._scheduler = scheduler
        self._seat: Seat = scheduler.server_args.prism_seat
        self._pieces = ModelPieces(scheduler.tp_worker.model_runner.model, int(scheduler.model_config.hidden_size))
        self._hub = LinkHub(self._seat.watch, self._seat.unwatch)
        me, model = self._seat.owner.name, self._seat.weights.identity
        ranks = self._ranks = Ranks(scheduler)
        self._foreign = ForeignWork(scheduler, self._pieces, me, model, self._seat.lent_owner, ranks)
        self._pieces.held = lambda: self._foreign.held
        self._asking = PeerAsking(scheduler.tp_worker.model_runner, self._wait, ranks, self._pieces.tensors_before)
        self._leader = RouteLeader(scheduler, self._pieces, self._asking, ranks)
        self._leader.attach()
        self.own_steps = OwnSteps(scheduler, self._pieces, self._foreign, self._leader)
        self._leader.along = self.own_steps.run
        self._routes = Routes(
            scheduler, self._pieces, self._hub, self._foreign, self._leader, ranks, self._begins_again
        )
        self._hub.on_handed = self._routes.greet_ahead
        self._growth = Growth(scheduler, self._pieces, self._foreign, self._leader, self._routes, ranks)
        self.under_way = BatchesUnderWay(
            scheduler, self._pieces, self._leader, self._is_quiet, RunAhead(scheduler, self._asking, self._has_time)
        )
        self._relay = Relay(self._hub, self._pass_on)
        if self._seat.world == 1:  # ranks do everything at the same steps
            self._pieces.computing = self._relay.computing
        self._late: list[Order] = []
        """Orders that wait until nothing is under way."""
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
    def whole(self) -> bool:
        """All of the model is here, and its requests need nobody."""
        return len(self._foreign.held) == self._pieces.count and not self._leader.remote

    @property
    def held_pieces(self) -> int:
        """Whose weights are in memory."""
        return len(self._foreign.held)

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
            pieces=sorted(self._pieces.usable(held)),
            alone=self.whole,
            peers=[] if self.stalled else [peer.link.label or peer.name for peer in self._leader.peers],
            leaders=self._foreign.leaders,
            taken=self._growth.taken,
            parts=self._leader.parts,
            ahead=MOST - 1 if self.under_way.possible else 1,
            most=self.under_way.most,
            run_ahead=self.under_way.run_ahead,
            shared=self._foreign.shared,
            along=self._foreign.along,
        )

    def due(self, orders: Sequence[Order]) -> list[Order]:
        """Those that may be carried out now: none with batches under way."""
        self._late += orders
        due: list[Order] = []
        if not self.under_way:
            due, self._late = self._late, []
        return due

    def _is_quiet(self) -> bool:
        """Nothing is to be begun beside other batches: orders wait, or layers are to be taken over."""
        return bool(self._late) or self._growth.takes_over or self._routes.stalled

    def _has_time(self) -> frozenset[int]:
        """While its batches are with peers: what is here by now, if nobody waits for this engine."""
        self._growth.look()
        return frozenset() if self._foreign.waiting else self._foreign.held

    def _begins_again(self) -> list[Any]:
        self._growth.stop_taking()
        return self.under_way.drop()

    def step(self, orders: Sequence[Order]) -> None:
        """Between two steps of the scheduler."""
        if self._ranks.leads:
            self._pump(0.0)
        waiting = self._agree()
        for order in orders:
            self._carry_out(order)
        if self._leader.lost or any(peer.lost for peer in self._leader.peers):
            self._routes.go_on_elsewhere()
        self._growth.go_on(self._idle, alone=not self.under_way)
        if waiting and not self._idle and not self._leader.remote:
            self.serve(left=self.own_steps.take_along)  # else while the own batch waits, or because there is none

    def rest(self, most_s: float) -> None:
        """Nothing is to be done, for ``most_s`` at most: until a command, a message, or a piece of the model comes. On
        rank 0."""
        end_s, came = time.monotonic() + most_s, self._foreign.waiting > 0
        while not came and (left_s := end_s - time.monotonic()) > 0:
            if self._growth.weights_came:
                return
            came = self._seat.wait(min(left_s, LOOK_S) if self._growth.waits else left_s)

    def serve(self, left: bool = False) -> None:
        """The scheduler has nothing to run, or its route does not wait for others. ``left``: of what did not go along
        with its last step."""
        self._ranks.together(lambda: self._serve_round(left))

    def _serve_round(self, left: bool) -> RanksOutcome:
        """A step of each leader, as engines that share a device take turns; its own next step is behind them. A command
        is looked at between two layers, if an order could be carried out now."""
        self._foreign.serve_round(None if self.under_way else self._seat.called, left)
        return RanksOutcome()

    def _agree(self) -> int:
        """Which peers and leaders are lost, as rank 0 sees it; how much foreign work waits there."""
        foreign, peers = self._foreign, self._routes.peers

        def seen() -> RanksOutcome:
            return RanksOutcome([foreign.waiting, *(int(peer.closed) for peer in peers), *foreign.take_gone()])

        waiting, *rest = self._ranks.together(seen).numbers
        for peer, lost in zip(peers, rest, strict=False):
            peer.lost = peer.lost or bool(lost)
        foreign.forget(rest[len(peers) :])
        return waiting

    @property
    def _idle(self) -> bool:
        scheduler = self._scheduler
        nothing_runs = scheduler.running_batch.is_empty() and scheduler.last_batch is None and not self.under_way
        return nothing_runs and not scheduler.waiting_queue

    # --- messages ---

    def _pump(self, timeout_s: float) -> None:
        self._deal(self._hub.pump(timeout_s))
        self._foreign.forget_closed()

    def _deal(self, arrived: Sequence[tuple[PeerLink, Received]]) -> None:
        for link, received in arrived:
            asked = isinstance(received.message, PeerHello | MeasureLink | Leading | RunPieces | RunRest | FetchKv)
            (self._foreign if asked else self._asking).take(link, received)

    def _pass_on(self) -> None:
        """While this engine computes, in another thread: what is kept for leaders stays."""
        self._deal(self._hub.pump(0.0))
        self.under_way.pass_on()

    def _wait(self, timeout_s: float) -> None:
        """The leader waits for an answer. On rank 0, while the other ranks do what it tells them."""
        self._pump(0.0 if self._foreign.waiting else timeout_s)
        self._foreign.serve_one()

    # --- orders ---

    def _carry_out(self, order: Order) -> None:
        error = ""
        try:
            match order:
                case ServeLayers():
                    if self._ranks.leads:
                        self._hub.listen(Path(order.path))
                case HoldPieces():
                    self._hold(order)
                case SetRoute():
                    self._growth.end()
                    self._routes.set(order)
                case GrowRoute():
                    self._growth.begin(order)
        except RanksApart:
            raise
        except Exception as problem:
            log.exception("an order was not carried out")
            error = f"{type(problem).__name__}: {problem}"
        self._seat.ordered(order.number, error)

    def _hold(self, order: HoldPieces) -> None:
        wanted, held = frozenset(order.pieces), self._foreign.held
        if not wanted <= frozenset(range(self._pieces.count)):
            raise ValueError(f"pieces must be in [0, {self._pieces.count}), got {sorted(wanted)}")
        needed = {p for s in self._leader.route if s.peer is None for p in range(s.first, s.end)}
        if not needed <= wanted:
            raise ValueError(f"the route runs pieces {sorted(needed)} here; only {sorted(wanted)} are to be kept")
        if wanted == held:
            return
        self._growth.stop_taking()
        self._foreign.drop_all()
        problem = self._bring(wanted)
        if not self._ranks.all(problem is None):
            if problem is None:
                self._bring(held)
            raise problem or RuntimeError("another rank has no room for them")
        self._foreign.held = wanted

    def _bring(self, pieces: frozenset[int]) -> Exception | None:
        try:
            self._seat.weights.hold(self._pieces.model, lambda name: self._pieces.piece_of(name) in pieces)
        except PrismError as error:
            return error
        return None

    def close(self) -> None:
        """The model leaves."""
        self._relay.close()
        self.under_way.drop()
        self._routes.close()
        self._leader.detach()
        self._pieces.close()
        self._foreign.drop_all()
        self._hub.close()


def _check_engine(scheduler: Any) -> None:
    args = scheduler.server_args
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = {
        "LoRA adapters": scheduler.enable_lora,
        "speculative decoding": scheduler.draft_worker is not None,
        "embeddings": not scheduler.is_generation,
        "an encoder that layers look at": scheduler.model_config.is_encoder_decoder,
        strange_rows(kvcache): bool(strange_rows(kvcache)),
        f"pages of {args.page_size} tokens": args.page_size != 1,
    }
    for what, is_so in found.items():
        if is_so:
            raise refuse(f"layers in other engines together with {what}", "it with all layers here")
