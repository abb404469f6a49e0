"""Receiving one window by multicast: pulls in the plan's order, verifies, passes on, and routes around what fails.

Two lanes pull. The first follows the plan, one transfer at a time, each asked for while its predecessor's last bytes
arrive. The second fetches pieces that have lost their sender - dead (silent for ``dead_s``) or far slower than others.
When a piece is so late that the plan has slipped (:mod:`prism.transfer.patience`) both lanes leave the plan and take
what is missing from whoever has it (:mod:`prism.transfer.piece_choice`). There is no barrier: whoever has a piece may
pass it on at once. A node that joins late has no part in the plan and gets everything the second way. A piece is under
way from one peer at a time, and what came before it was broken off is kept: going round somebody costs no byte twice.

The bound on the delay is in docs/weights.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.frames import Get
from prism.transfer.holder_choice import HolderChoice
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.peer_connection import PullTerms, TooLate, TooSlow
from prism.transfer.peer_pool import PeerPool
from prism.transfer.reception import Reception

DEAD_S: Final = 0.5
GIVE_UP_S: Final = 15.0
"""Pieces that no reachable node holds for this long end the reception."""
_RETRY_S: Final = 0.02
WARM_BYTES: Final = 512 << 10
"""Opens windows for links on which a round trip is worth so much (10 Gbit/s and 0.4 ms, 400 Mbit/s and 10 ms)."""
logger = logging.getLogger(__name__)


class PullLanes:
    """The pulling threads of one reception. Start them (:meth:`start_threads`), then watch ``reception``. Bytes come
    over ``network`` from every peer that offers the same, over TCP from the others."""

    def __init__(
        self, reception: Reception, secret: bytes, dead_s: float = DEAD_S, network: OneSidedNetwork | None = None
    ) -> None:
        self._network = network
        self.reception, self.plan = reception, reception.plan
        self._secret, self._dead_s = secret, dead_s
        self._holders = HolderChoice(self.plan, reception)
        self._threads: list[threading.Thread] = []
        self._blamed: set[str] = set()
        self.connected, self.go = threading.Event(), threading.Event()
        """Connections are open; pulling may begin."""

    def start_threads(self) -> None:
        planned = {piece for _, piece in self.plan.receives}
        self.reception.orphan_pieces(p for p in range(self.plan.pieces) if p not in planned)
        for work in (self._follow_plan, self._fetch_rest):
            thread = threading.Thread(target=self._run, args=(work,), name=f"transfer-{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join_threads(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[PeerPool], None]) -> None:
        peers = PeerPool(self.plan.addresses, self._secret, self.plan.node, self._dead_s)
        try:
            work(peers)
        except Exception as error:  # a lane must not die in silence: whoever waits gets its error
            self.connected.set()
            self.reception.stop(error)
        finally:
            peers.close()

    def _fetch_rest(self, peers: PeerPool) -> None:
        for node in self._holders.nodes(trusted=True):
            if self.go.is_set():
                break
            with contextlib.suppress(OSError, EOFError, PeerError):  # perhaps it is never needed
                peers.get(node)
        self.go.wait()
        self._repair(peers)

    # --- the plan's lane ---

    def _follow_plan(self, peers: PeerPool) -> None:
        for source in dict.fromkeys(source for source, _ in self.plan.receives):
            self._connect(peers, source)
        self.connected.set()
        self.go.wait()
        self.reception.begin_pulling()
        current = self._ask_next(peers)
        while current is not None and not self.reception.over:
            current = self._take(peers, *current)
        self._repair(peers)

    def _connect(self, peers: PeerPool, source: str) -> None:
        """Opens the connection ahead of need, and its windows if there is time; a source that cannot be reached loses
        its part of the plan."""
        try:
            peer = peers.get(source)
            if not self.go.is_set():
                peer.open_windows(WARM_BYTES)
        except (OSError, EOFError, PeerError) as error:
            self._blame(peers, source, f"unreachable: {error}")

    def _ask_next(self, peers: PeerPool) -> tuple[str, int] | None:
        while (following := self.reception.claim_next_planned()) is not None:
            if self._ask(peers, *following, scheduled=True):
                return following
        return None

    def _take(self, peers: PeerPool, source: str, piece: int) -> tuple[str, int] | None:
        """Receives what was asked for; what was asked for next meanwhile."""
        self.reception.take_in_hand(piece)
        following: list[tuple[str, int] | None] = []
        reason = self._receive(peers, source, piece, lambda: following.append(self._ask_next(peers)))
        if reason is not None and following and following[0] is not None and following[0][0] == source:
            lost = following.pop()
            assert lost is not None
            self.reception.put_back_piece(lost[1])  # it was asked for on the connection that broke
        return following[0] if following else self._ask_next(peers)

    # --- both lanes ---

    def _ask(self, peers: PeerPool, source: str, piece: int, scheduled: bool) -> bool:
        """Sends the request for a claimed piece; False (and the piece orphaned) if the source is gone."""
        offset, window = self.reception.missing_of(piece)
        self.reception.landing.populate(offset, window.nbytes)
        get = Get(
            session=self.plan.session,
            window=self.plan.window,
            piece=piece,
            offset=offset,
            nbytes=window.nbytes,
            node=self.plan.node,
            scheduled=scheduled,
        )
        try:
            peer = peers.get(source)
            usable = self._network is not None and self._network.name in peer.networks
            peer.request(msgspec.structs.replace(get, network=self._network.name) if self._network and usable else get)
        except (OSError, EOFError, PeerError) as error:
            self.reception.give_up_piece(piece, source, f"unreachable: {error}")
            self._blame(peers, source, f"unreachable: {error}")
            return False
        return True

    def _receive(
        self,
        peers: PeerPool,
        source: str,
        piece: int,
        on_nearly: Callable[[], None],
        repair: bool = False,
        sole: bool = False,
    ) -> str | None:
        """Receives a piece asked for; None, or the reason why it did not come (the piece is an orphan then). One for
        ``repair`` soon looks whether somebody else has the piece by now; from its ``sole`` holder any rate will do."""
        reception = self.reception
        pull = self._pull(source, piece, on_nearly, repair, sole)
        try:
            took_s = peers.get(source).receive(pull)
        except TooLate:
            peers.drop(source)
            self._holders.note_unfinished(source, piece)
            reason = "late"
            if repair:
                reception.put_back_piece(piece)
                return reason
        except TooSlow as error:
            reason = "slow"
            self._blame(peers, source, reason, error.nbytes, error.took_s)
        except (OSError, EOFError, PeerError) as error:
            reason = f"dead: {error}"
            self._blame(peers, source, reason)
        else:
            if reception.finish_piece(piece, source, took_s, pull.into.nbytes):
                return None
            logger.warning("%s: piece %d from %s is corrupt", self.plan.node, piece, source)
            reason = "corrupt"
            self._blame(peers, source, reason)
        reception.give_up_piece(piece, source, reason)
        return reason

    def _pull(self, source: str, piece: int, on_nearly: Callable[[], None], repair: bool, sole: bool) -> PullTerms:
        reception = self.reception
        offset, window = reception.missing_of(piece)
        leaf_bytes = reception.cut.leaf_bytes
        return PullTerms(
            into=window,
            to_leaf_end=leaf_bytes - offset % leaf_bytes,
            leaf_bytes=leaf_bytes,
            overdue=lambda waited_s: (repair or reception.slipped) and waited_s > reception.turn_s(),
            half_s=float("inf") if sole else (1 + repair) * reception.half_s(source, window.nbytes),
            on_nearly=on_nearly,
            on_bytes=lambda nbytes: reception.on_bytes(piece, nbytes),
            read=self._one_sided(offset, window.nbytes),
        )

    def _one_sided(self, offset: int, nbytes: int) -> Callable[[bytes, Callable[[], None]], None] | None:
        network, memory = self._network, self.reception.landing.span
        if network is None:
            return None
        return lambda descriptor, raise_if_dead: network.read(descriptor, memory, offset, nbytes, raise_if_dead)

    def _blame(self, peers: PeerPool, source: str, reason: str, nbytes: int = 0, took_s: float = 0.0) -> None:
        """``source`` failed: everything the plan still expects from it comes from elsewhere."""
        peers.drop(source)
        first = source not in self._blamed  # the only one that has something is asked again and again
        self._blamed.add(source)
        logger.log(
            logging.WARNING if first else logging.DEBUG, "%s: routes around %s (%s)", self.plan.node, source, reason
        )
        self.reception.blame_source(source, nbytes, took_s)
        self.reception.lose_source(source)

    # --- what the plan does not bring ---

    def _repair(self, peers: PeerPool) -> None:
        """Fetches orphans until the session is over. Raises :class:`SourceLost`."""
        nobody_since_s: float | None = None
        while not self.reception.over:
            wanted = self.reception.await_orphans(timeout_s=0.2)
            if not wanted:
                continue
            chosen = self._choose(peers, (self._wanted_soon(wanted), wanted))
            if chosen is None:
                now_s = time.monotonic()
                nobody_since_s = nobody_since_s or now_s
                if now_s - nobody_since_s > GIVE_UP_S:
                    raise SourceLost(f"{self.plan.node}: no node that can be reached holds piece {wanted[0]}")
                time.sleep(_RETRY_S)
                continue
            nobody_since_s = None
            source, piece, sole = chosen
            if self.reception.claim_piece(piece) and self._ask(peers, source, piece, scheduled=False):
                self._receive(peers, source, piece, lambda: None, repair=True, sole=sole)

    def _wanted_soon(self, wanted: list[int]) -> list[int]:
        """Where whoever receives is used before it has everything: what is needed first, and then what would have come
        next, since a layer of which parts are missing is of no use. Elsewhere the order of pieces means nothing."""
        if not self.plan.first:
            return []
        return [piece for piece in wanted if piece in self.plan.first] or wanted[:1]

    def _choose(self, peers: PeerPool, wishes: Sequence[Sequence[int]]) -> tuple[str, int, bool] | None:
        """As :meth:`HolderChoice.choose`: who is trusted first, then the others."""

        def on_failed(node: str, reason: str) -> None:
            self._blame(peers, node, reason)

        for trusted in (True, False):
            if (chosen := self._holders.choose(peers, wishes, trusted, on_failed)) is not None:
                return chosen
        return None
