"""What a receiving node knows of one session: which pieces are here, under way or to be had elsewhere, who failed.

Shared by the lanes that pull (:mod:`prism.transfer.pull_lanes`). A piece is *open*, *claimed* by a lane, or *held*.
Bytes that came before a transfer broke off are kept, the next one goes on behind them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from prism.transfer.patience import Patience
from prism.transfer.progress import ReceptionProgress, Reroute
from prism.transfer.session import NodePlan, cut_pieces, piece_bytes
from prism.transfer.windows import Landing


class Reception:
    """Thread-safe. ``on_arrived`` is called, without locks held, after leaves have been verified."""

    def __init__(self, plan: NodePlan, landing: Landing, on_arrived: Callable[[], None]) -> None:
        self.plan, self.landing, self._on_arrived = plan, landing, on_arrived
        self.cut = landing.cut
        self.pieces = cut_pieces(self.cut, plan.pieces)
        guard = threading.RLock()
        self.changed, self._came = threading.Condition(guard), threading.Condition(guard)
        self._wanted = -1
        """The leaf that :meth:`await_leaf` waits for."""
        self.start_s = time.monotonic()
        self.progress = ReceptionProgress(self.cut.nbytes, plan.pieces)
        self.failed: BaseException | None = None
        self.stopped = False
        steps = {piece: step for (_, piece), step in zip(plan.receives, plan.steps, strict=False)}
        piece_bytes_mean = self.cut.nbytes / max(plan.pieces, 1)
        self.patience = Patience(steps, plan.known_piece_s, piece_bytes_mean, len(plan.addresses) - 1, plan.near)
        """Used with ``changed`` held."""
        self.slipped = not plan.receives
        """The plan is no longer followed."""
        self._queue = deque(plan.receives)
        self._at_hand: int | None = None
        self.arrived_s: dict[int, float] = {}
        self._kept = [0] * plan.pieces
        self._next_leaf = [leaves.start for leaves in self.pieces]
        """The first leaf of each piece that was not verified yet."""
        self._bad: dict[int, int] = {}
        """Pieces whose bytes are not right, and the first leaf of each that is not."""
        self._claimed: set[int] = set()
        self._held = {i for i, leaves in enumerate(self.pieces) if landing.has(leaves)}
        self._orphans: deque[int] = deque()
        self.progress.pieces_done = len(self._held)

    @property
    def complete(self) -> bool:
        return len(self._held) == self.plan.pieces

    @property
    def over(self) -> bool:
        return self.complete or self.stopped or self.failed is not None

    def claim_piece(self, piece: int) -> bool:
        """Takes an open piece for the calling lane; False if it is held or another lane has it."""
        with self.changed:
            if piece in self._held or piece in self._claimed:
                return False
            self._claimed.add(piece)
            return True

    def missing_of(self, piece: int) -> tuple[int, memoryview]:
        """Offset in the window and memory of what is still missing of a claimed piece."""
        offset, nbytes = piece_bytes(self.cut, self.pieces[piece])
        kept = self._kept[piece]
        return offset + kept, self.landing.view(offset + kept, offset + nbytes)

    def on_bytes(self, piece: int, nbytes: int) -> None:
        """More bytes of a claimed piece are in place: leaves that are whole now are verified, and passed on."""
        self._kept[piece] += nbytes
        self.progress.bytes_done += nbytes
        reached = piece_bytes(self.cut, self.pieces[piece])[0] + self._kept[piece]
        good = False
        while (leaf := self._next_leaf[piece]) < self.pieces[piece].stop:
            if self.cut.bounds(leaf)[1] > reached:
                break
            if self.landing.accept(leaf):
                good = True
                if leaf == self._wanted:
                    with self.changed:
                        self._came.notify_all()
            else:
                self._bad.setdefault(piece, leaf)
            self._next_leaf[piece] = leaf + 1
        if good:
            self._on_arrived()

    def await_leaf(self, leaf: int, timeout_s: float) -> None:
        """Blocks until ``leaf`` is here and verified, the reception has ended, or ``timeout_s`` are over. For one
        thread, which is not woken for any other leaf."""
        with self.changed:
            self._wanted = leaf
            if not self.landing.has(range(leaf, leaf + 1)) and not self.over:
                self._came.wait(timeout_s)

    def finish_piece(self, piece: int, source: str, took_s: float, nbytes: int) -> bool:
        """All bytes of a claimed piece are in place. False if they are not what the header promises; the piece is open
        again then and will be fetched anew from its first bad leaf on."""
        good = piece not in self._bad
        with self.changed:
            self._claimed.discard(piece)
            if good:
                self._held.add(piece)
                self.patience.on_piece(piece, source, nbytes, took_s, time.monotonic())
                self.patience.forgive_if_equal(source)
                self.progress.add_piece(source, nbytes, took_s)
                self.progress.pieces_done = len(self._held)
                self.arrived_s[piece] = time.monotonic()
                if self.complete:
                    self.progress.took_s = time.monotonic() - self.start_s
            else:
                self._begin_again(piece)
            self.changed.notify_all()
        if good:
            self._on_arrived()
        return good

    def _begin_again(self, piece: int) -> None:
        leaf = self._bad.pop(piece)
        kept = self.cut.bounds(leaf)[0] - piece_bytes(self.cut, self.pieces[piece])[0]
        self.progress.bytes_done -= self._kept[piece] - kept
        self._kept[piece], self._next_leaf[piece] = kept, leaf

    def give_up_piece(self, piece: int, source: str, reason: str) -> None:
        """A claimed piece will not come from ``source``: it is an orphan now."""
        with self.changed:
            self._claimed.discard(piece)
            self.progress.reroutes.append(Reroute(piece, source, reason, time.monotonic() - self.start_s))
        self.orphan_pieces([piece])

    # --- the plan, until it slips ---

    def begin_pulling(self) -> None:
        """Pulling begins."""
        with self.changed:
            self.patience.begin_pulling(time.monotonic())
            self.changed.notify_all()

    def claim_next_planned(self) -> tuple[str, int] | None:
        """(from whom, which piece) comes next by the plan, claimed; None when there is no more, or the plan slipped."""
        with self.changed:
            while self._queue and not self.over and not self.slipped:
                source, piece = self._queue.popleft()
                if self.claim_piece(piece):
                    return source, piece
        return None

    def take_in_hand(self, piece: int) -> None:
        """``piece`` is what the plan expects next."""
        with self.changed:
            self._at_hand = piece
            self.changed.notify_all()

    def leave_plan(self) -> None:
        """From now on pieces are taken wherever they are."""
        with self.changed:
            self.slipped = True
            owed = [piece for _, piece in self._queue]
            self._queue.clear()
        self.orphan_pieces(owed)

    def lose_source(self, source: str) -> None:
        """``source`` failed: everything the plan still expects from it comes from elsewhere."""
        with self.changed:
            owed = [item for item in self._queue if item[0] == source]
            for item in owed:
                self._queue.remove(item)
        self.orphan_pieces(piece for _, piece in owed)

    # --- what comes from elsewhere ---

    def orphan_pieces(self, pieces: Iterable[int]) -> None:
        """These pieces have no sender in the plan any more."""
        with self.changed:
            self._orphans.extend(p for p in pieces if p not in self._held and p not in self._orphans)
            self.changed.notify_all()

    def await_orphans(self, timeout_s: float) -> list[int]:
        """Orphans that no lane has claimed, oldest first; waits for some, at most ``timeout_s``. Leaves the plan when
        it slips meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while not self.over:
                now_s = time.monotonic()
                slips_s = float("inf") if self.slipped else self.patience.slips_at_s(self._at_hand)
                if now_s >= slips_s:
                    self.leave_plan()
                    continue
                self._orphans = deque(p for p in self._orphans if p not in self._held)
                found = [p for p in self._orphans if p not in self._claimed]
                if found:
                    return found
                left_s = min(deadline_s, slips_s) - now_s
                if left_s <= 0:
                    break
                self.changed.wait(left_s)
        return []

    def put_back_piece(self, piece: int) -> None:
        """A claimed orphan that nobody could give yet."""
        with self.changed:
            self._claimed.discard(piece)
        self.orphan_pieces([piece])

    def stop(self, error: BaseException | None = None) -> None:
        with self.changed:
            self.stopped = True
            self.failed = self.failed or error
            self.changed.notify_all()
            self._came.notify_all()

    # --- patience and trust, for any thread ---

    def half_s(self, source: str, nbytes: int) -> float:
        """See :meth:`~prism.transfer.patience.Patience.half_s`."""
        with self.changed:
            return self.patience.half_s(source, nbytes)

    def turn_s(self) -> float:
        """See :meth:`~prism.transfer.patience.Patience.turn_s`."""
        with self.changed:
            return self.patience.turn_s()

    def blame_source(self, source: str, nbytes: int = 0, took_s: float = 0.0) -> None:
        """See :meth:`~prism.transfer.patience.Patience.blame`."""
        with self.changed:
            if took_s > 0:
                self.progress.add_timed(source, nbytes, took_s)
            self.patience.blame(source, time.monotonic(), nbytes, took_s)

    def trusts(self, source: str) -> bool:
        with self.changed:
            return self.patience.trusts(source, time.monotonic())
