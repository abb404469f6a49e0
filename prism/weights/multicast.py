"""Receiving one pack by multicast: pulls in the plan's order, verifies, passes on, and routes around what fails.

Two lanes pull. The first follows the plan, one transfer at a time, each asked for while its predecessor's last bytes
arrive. The second starts when a piece has lost its sender - dead (silent for ``dead_s``), far too slow, or too late -
and fetches it from whichever node holds it and has the least to do. There is no barrier: whoever has a piece may pass
it on at once. A node that joins late has no part in the plan and gets everything the second way.

Bound on the delay: a dead node costs each of its receivers ``dead_s`` once, then the pieces it owed come from others.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from prism.weights.errors import PeerError, SourceLost
from prism.weights.frames import Get
from prism.weights.mover import Mover
from prism.weights.peer import Peers, Pull, TooLate, TooSlow
from prism.weights.reception import Reception

DEAD_S: Final = 0.5
GIVE_UP_S: Final = 15.0
"""A piece that no reachable node holds for this long ends the reception."""
_ASKED_NODES: Final = 8
_SOURCE_PENALTY: Final = 4
"""The sources have the whole plan to serve: another holder is preferred up to this many waiting pulls."""
_RETRY_S: Final = 0.05
WARM_BYTES: Final = 512 << 10
"""Opens windows for links on which a round trip is worth so much (10 Gbit/s and 0.4 ms, 400 Mbit/s and 10 ms)."""
logger = logging.getLogger(__name__)


class Lanes:
    """The pulling threads of one reception. ``start`` them, then watch ``reception``. Bytes come over ``mover`` from
    every peer that offers the same, over TCP from the others."""

    def __init__(self, reception: Reception, secret: bytes, dead_s: float = DEAD_S, mover: Mover | None = None) -> None:
        self._mover = mover
        self.reception, self.plan = reception, reception.plan
        self._secret, self._dead_s = secret, dead_s
        self._queue: deque[tuple[str, int]] = deque(self.plan.receives)
        self._threads: list[threading.Thread] = []
        self.connected, self.go = threading.Event(), threading.Event()
        """Connections are open; pulling may begin."""

    def start(self) -> None:
        planned = {piece for _, piece in self.plan.receives}
        self.reception.orphan(p for p in range(self.plan.pieces) if p not in planned)
        for work in (self._follow_plan, self._second):
            thread = threading.Thread(target=self._run, args=(work,), name=f"weights-{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[Peers], None]) -> None:
        peers = Peers(self.plan.addresses, self._secret, self.plan.node, self._dead_s)
        try:
            work(peers)
        except Exception as error:  # a lane must not die in silence: whoever waits gets its error
            self.connected.set()
            self.reception.stop(error)
        finally:
            peers.close()

    def _second(self, peers: Peers) -> None:
        self._repair(peers)

    # --- the plan's lane ---

    def _follow_plan(self, peers: Peers) -> None:
        for source in dict.fromkeys(source for source, _ in self.plan.receives):
            self._connect(peers, source)
        self.connected.set()
        self.go.wait()
        current = self._ask_next(peers)
        first = True
        while current is not None and not self.reception.over:
            current = self._take(peers, *current, first)
            first = False
        self._repair(peers)

    def _connect(self, peers: Peers, source: str) -> None:
        """Opens the connection ahead of need, and its windows if there is time; a source that cannot be reached loses
        its part of the plan."""
        try:
            peer = peers.get(source)
            if not self.go.is_set():
                peer.warm(WARM_BYTES)
        except (OSError, EOFError, PeerError) as error:
            self._blame(peers, source, f"unreachable: {error}")

    def _ask_next(self, peers: Peers) -> tuple[str, int] | None:
        while self._queue and not self.reception.over:
            source, piece = self._queue.popleft()
            if not self.reception.claim(piece):
                continue
            if not self._ask(peers, source, piece, scheduled=True):
                continue
            return source, piece
        return None

    def _take(self, peers: Peers, source: str, piece: int, first: bool) -> tuple[str, int] | None:
        """Receives what was asked for; what was asked for next meanwhile."""
        following: list[tuple[str, int] | None] = []
        reason = self._receive(peers, source, piece, first, lambda: following.append(self._ask_next(peers)))
        if reason is not None and following and following[0] is not None and following[0][0] == source:
            lost = following.pop()
            assert lost is not None
            self.reception.put_back(lost[1])  # it was asked for on the connection that broke
        return following[0] if following else self._ask_next(peers)

    # --- both lanes ---

    def _ask(self, peers: Peers, source: str, piece: int, scheduled: bool) -> bool:
        """Sends the request for a claimed piece; False (and the piece orphaned) if the source is gone."""
        offset, window = self.reception.window(piece)
        self.reception.copy.populate(offset, window.nbytes)
        get = Get(
            session=self.plan.session,
            key=self.plan.key,
            piece=piece,
            offset=offset,
            nbytes=window.nbytes,
            node=self.plan.node,
            scheduled=scheduled,
        )
        try:
            peer = peers.get(source)
            usable = self._mover is not None and self._mover.name in peer.movers
            peer.ask(msgspec.structs.replace(get, mover=self._mover.name) if self._mover and usable else get)
        except (OSError, EOFError, PeerError) as error:
            self.reception.give_up(piece, source, f"unreachable: {error}")
            self._blame(peers, source, f"unreachable: {error}")
            return False
        return True

    def _receive(
        self,
        peers: Peers,
        source: str,
        piece: int,
        first: bool,
        nearly: Callable[[], None],
        repair: bool = False,
        patient: bool = False,
    ) -> str | None:
        """Receives a piece asked for; None, or the reason why it did not come (the piece is an orphan then). A
        ``patient`` pull takes any rate; one for ``repair`` soon looks whether somebody else has the piece by now."""
        reception = self.reception
        pull = self._pull(piece, first, nearly, repair, patient)
        try:
            took_s = peers.get(source).receive(pull)
        except TooLate:
            peers.drop(source)
            reason = "late"
            if repair:
                reception.put_back(piece)
                return reason
        except TooSlow:
            reception.blame_slow(source)
            reason = "slow"
            self._blame(peers, source, reason)
        except (OSError, EOFError, PeerError) as error:
            reason = f"dead: {error}"
            self._blame(peers, source, reason)
        else:
            if reception.finish(piece, source, took_s, pull.into.nbytes):
                return None
            logger.warning("%s: piece %d from %s is corrupt", self.plan.node, piece, source)
            reason = "corrupt"
            self._blame(peers, source, reason)
        reception.give_up(piece, source, reason)
        return reason

    def _pull(self, piece: int, first: bool, nearly: Callable[[], None], repair: bool, patient: bool) -> Pull:
        reception = self.reception
        offset, window = reception.window(piece)
        leaf_bytes = reception.copy.header.leaf_bytes
        return Pull(
            into=window,
            to_leaf_end=leaf_bytes - offset % leaf_bytes,
            leaf_bytes=leaf_bytes,
            late_s=reception.repair_s() if repair else reception.late_s(first),
            unheld_s=reception.unheld_s(first),
            slow_s=float("inf") if patient else reception.slow_s(),
            nearly=nearly,
            got=lambda nbytes: reception.got(piece, nbytes),
            read=self._one_sided(offset, window.nbytes),
        )

    def _one_sided(self, offset: int, nbytes: int) -> Callable[[bytes, Callable[[], None]], None] | None:
        mover, copy = self._mover, self.reception.copy
        if mover is None:
            return None
        return lambda descriptor, alive: mover.read(descriptor, copy, offset, nbytes, alive)

    def _blame(self, peers: Peers, source: str, reason: str) -> None:
        """``source`` failed: everything the plan still expects from it comes from elsewhere."""
        peers.drop(source)
        if source not in self.reception.avoid:
            logger.warning("%s: routes around %s (%s)", self.plan.node, source, reason)
        self.reception.avoid[source] = reason
        owed = [item for item in self._queue if item[0] == source]
        for item in owed:
            self._queue.remove(item)
        self.reception.orphan(piece for _, piece in owed)

    # --- the repairing lane ---

    def _repair(self, peers: Peers) -> None:
        """Fetches orphans until the session is over. Raises :class:`SourceLost`."""
        nobody_since_s: float | None = None
        while not self.reception.over:
            piece = self.reception.take_orphan(timeout_s=0.2)
            if piece is None:
                continue
            holders = self._holders(peers, piece)
            if not holders:
                self.reception.put_back(piece)
                now_s = time.monotonic()
                nobody_since_s = nobody_since_s or now_s
                if now_s - nobody_since_s > GIVE_UP_S:
                    raise SourceLost(f"{self.plan.node}: no node that can be reached holds piece {piece}")
                time.sleep(_RETRY_S)
                continue
            nobody_since_s = None
            if self._ask(peers, holders[0], piece, scheduled=False):
                self._receive(peers, holders[0], piece, False, lambda: None, repair=True, patient=len(holders) == 1)

    def _holders(self, peers: Peers, piece: int) -> list[str]:
        """Nodes that hold the piece, the least busy first; nodes that failed before only if nobody else is left."""
        others = [n for n in self.plan.addresses if n != self.plan.node]
        trusted = [n for n in others if n not in self.reception.avoid]
        return self._who_has(peers, piece, trusted) or self._who_has(
            peers, piece, [n for n in others if n in self.reception.avoid]
        )

    def _who_has(self, peers: Peers, piece: int, nodes: list[str]) -> list[str]:
        leaves = self.reception.pieces[piece]
        found: list[tuple[int, str]] = []
        turn = (zlib.crc32(self.plan.node.encode()) + piece) % max(
            len(nodes), 1
        )  # spreads the questions over the nodes
        for node in [*(nodes[turn:] + nodes[:turn])[:_ASKED_NODES], *(s for s in self.plan.sources if s in nodes)]:
            if any(node == known for _, known in found):
                continue
            try:
                arrival = peers.get(node).arrival(self.plan.key)
            except (OSError, EOFError, PeerError) as error:
                self._blame(peers, node, f"unreachable: {error}")
                continue
            if arrival.leaves and all(b == 1 for b in arrival.leaves[leaves.start : leaves.stop]):
                found.append((arrival.waiting + _SOURCE_PENALTY * (node in self.plan.sources), node))
        return [node for _, node in sorted(found)]
