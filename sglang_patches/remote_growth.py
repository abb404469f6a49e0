"""An engine grows: pieces that have arrived are brought into its model, and it takes over what peers ran of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from prism.core.errors import PrismError
from prism.memory.errors import OutOfMemory
from prism.remote.orders import GrowRoute, KvWay
from prism.remote.state import LayersTaken
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_questions import PeerLost
from sglang_patches.remote_ranks import Ranks
from sglang_patches.remote_routes import Routes
from sglang_patches.remote_stops import Stop
from sglang_patches.remote_taking import KvTaking, ends_held, grown
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)

BRING_S: Final = 0.003
"""Between two steps, beside the slice of KV that may be fetched there, too: no estimate of a pause counts it,"""
BRING_SHARE: Final = 0.1
"""or such a part of the last one, if that is more: weights come faster than long steps would let them in."""
WORTH_TAKING: Final = 0.25
"""Of the layers that peers run, while requests run and not all is here: for each time that some are taken over nothing
is begun, and peers are asked for KV between two of their steps. What comes later is run ahead meanwhile
(:mod:`sglang_patches.remote_ahead`)."""
LOOK_S: Final = 0.005
"""An engine without work looks so often whether weights have come: others may wait for its next layer, and what fills
host memory is another process, or a thread of this one."""


class Growth:
    """Of one engine, from a :class:`prism.remote.orders.GrowRoute` until it goes on alone."""

    def __init__(
        self,
        scheduler: Any,
        pieces: ModelPieces,
        foreign: ForeignWork,
        leader: RouteLeader,
        routes: Routes,
        ranks: Ranks,
    ) -> None:
        self._scheduler, self._pieces, self._ranks = scheduler, pieces, ranks
        self._foreign, self._leader, self._routes = foreign, leader, routes
        self._seat: Seat = scheduler.server_args.prism_seat
        self._order: GrowRoute | None = None
        """Set while what peers run is to be taken over."""
        self._taking: KvTaking | None = None
        """Under way."""
        self.taken: LayersTaken | None = None
        """What was taken over last, and how long streams were to stand still for it."""
        self.fetched_tokens = 0
        """Tokens whose KV, or a part of it, was fetched from peers."""
        self._lacking = ""
        """Why weights do not come."""
        self._seen_bytes = 0
        """In host memory, when it was last looked what had come."""
        self._declined = 0
        """When so many pieces were here, fetching the KV of those that peers ran took longer than beginning again."""

    def begin(self, order: GrowRoute) -> None:
        """Raises ``ValueError`` for an order of pieces that the model does not have."""
        if not set(order.order) <= set(range(self._pieces.count)):
            raise ValueError(f"pieces must be in [0, {self._pieces.count}), got {order.order}")
        self.stop_taking()
        self._order = order

    def end(self) -> None:
        """The route stays as it is."""
        self._order = None

    @property
    def waits(self) -> bool:
        """Pieces are still to come."""
        leads = self._order is not None and (self._leader.remote or self._routes.stalled)
        return leads and len(self._foreign.held) < self._pieces.count

    @property
    def weights_came(self) -> bool:
        """Since it was last looked."""
        return self.waits and self._seat.weights.arrived_bytes != self._seen_bytes

    @property
    def takes_over(self) -> bool:
        """Layers are being taken over, or are here to be."""
        if self._order is None or not self._leader.remote:
            return False
        return self._taking is not None or bool(self._may_take(idle=False))

    def look(self) -> None:
        """Bring what has arrived, while batches are with peers."""
        if self.weights_came:
            self.go_on(idle=False, alone=False)

    def go_on(self, idle: bool, alone: bool = True) -> None:
        """Bring the pieces that have arrived (all of them while nothing runs, else as many as :data:`BRING_S` suffices
        for, one at least: pieces that come faster than steps end would never all be here), and when there is none,
        take over what is here of what peers run. Without peers the engine goes on alone once it has everything. Not
        ``alone``: batches are under way, and nothing is taken over."""
        if self._order is None or not (self._leader.remote or self._routes.stalled):
            return
        self._seen_bytes = self._seat.weights.arrived_bytes
        end_s = time.monotonic() + max(BRING_S, BRING_SHARE * self._leader.step_s)
        while self._bring_one(self._order.order):
            if not idle and self._ranks.same(time.monotonic() >= end_s):
                return
        self._tend()
        if not alone:
            return
        if self._routes.stalled:
            self._routes.go_on_alone()
        else:
            self._take_over(self._order.kv, idle)

    def _tend(self) -> None:
        """Weights that will never come are the end of an engine without peers; its requests go on elsewhere."""
        try:
            self._seat.weights.tend()
        except PrismError as error:
            if self._routes.stalled:
                raise
            if str(error) != self._lacking:
                log.error("the rest of the weights does not come, peers go on running it: %s", error)
            self._lacking = str(error)

    def _bring_one(self, order: Sequence[int]) -> bool:
        """False: nothing that could be brought has arrived (at all ranks)."""
        weights, held = self._seat.weights, self._foreign.held
        pieces = (*order, *range(self._pieces.count))
        piece = self._ranks.first((p for p in pieces if p not in held), weights.arrived)
        if piece is None:
            return False
        try:
            weights.bring(self._pieces.model, piece)
            came = True
        except OutOfMemory as error:
            log.warning("piece %d has no memory yet: %s", piece, error)
            came = False
        if not self._ranks.all(came):
            return False
        self._foreign.held = held | {piece}
        return True

    def _take_over(self, way: KvWay, idle: bool) -> None:
        """KV is fetched whenever pieces have come, and requests begin again once only, when all have."""
        if self._taking is None and (found := self._to_take(way, idle)) is not None and found.fetches:
            self._taking = found
        if (kv := self._taking) is None:
            return
        try:
            if not kv.fetch(all_at_once=idle):
                return
        except PeerLost as lost:
            log.warning("KV of %d layers is not fetched: %s", kv.layers, lost)
            self.stop_taking()  # the next step goes on elsewhere
            return
        self.fetched_tokens += kv.told.tokens
        self.stop_taking()
        self._grew(grown(self._leader.route, kv.runs), None if kv.nothing else kv.told)

    def _may_take(self, idle: bool) -> Any:
        """What is here and runs at peers, if it is to be taken over now."""
        held = self._foreign.held
        runs, whole = ends_held(self._leader.route, held), len(held) == self._pieces.count
        waits = self._order is not None and self._order.when_whole
        if whole or not runs:
            return runs
        at_peers = sum(stop.end - stop.first for stop in self._leader.route if stop.peer is not None)
        few = not idle and sum(run.end - run.first for run in runs) < WORTH_TAKING * at_peers
        return None if waits or few or len(held) == self._declined else runs

    def _to_take(self, way: KvWay, idle: bool) -> KvTaking | None:
        """What is here and runs at peers. When its KV is better made again, that is done when everything is here."""
        if not (runs := self._may_take(idle)):
            return None
        held = self._foreign.held
        whole = len(held) == self._pieces.count
        kv = KvTaking(self._scheduler, self._leader, runs, self._pieces.layers, way, self._ranks)
        self._declined = 0 if kv.fetches or whole else len(held)
        if whole and not kv.fetches:
            self._routes.begin_again()
            self._grew(grown(self._leader.route, runs), kv.told)
        return kv

    def _grew(self, route: tuple[Stop, ...], told: LayersTaken | None) -> None:
        self.taken = told or self.taken
        if told is not None:
            how = "fetched" if told.fetched else "to be made again"
            log.info("%d layers are taken over, KV of %d tokens %s", told.layers, told.tokens, how)
        if any(stop.peer is not None for stop in route):
            self._routes.use(route)
        else:
            self._routes.go_on_alone()

    def stop_taking(self) -> None:
        """What was fetched until now is of no use unless all was."""
        self._taking = self._leader.here = None
