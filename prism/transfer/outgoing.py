"""One session at the machine that is pulled from: its grants, shared by the threads of all connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from prism.transfer.frames import Get
from prism.transfer.grants import Grants, Pull
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.session import NodePlan, cut_pieces
from prism.transfer.windows import OfferedWindow, PinnedMemory

_WAKE_S: Final = 0.05
"""Longest sleep of a pull that waits: bounds how late it is noticed that its puller has gone."""
_LOOK_S: Final = 0.01
"""The same where bytes come without a word: from disk, or another process fills the copy."""


class _Turn:
    """One pull that waits for the link, or has it. A wake-up costs as much as sending 100 KiB, so nobody is woken but
    whose turn it is."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.granted = self.withdrawn = False


class OutgoingSession:
    """Thread-safe. ``window`` is this machine's, called ``name``, perhaps still arriving."""

    def __init__(self, name: str, window: OfferedWindow) -> None:
        self.name, self.window = name, window
        self.touched_s = time.monotonic()
        self._guard = threading.Lock()
        self._came = threading.Condition(self._guard)
        self._told = window.complete
        """Whether :meth:`on_arrived` says so when bytes come (or none will)."""
        self._ranges: dict[int, range] = {}
        self._grants = Grants(self._holds)
        self._turns: dict[Pull, _Turn] = {}
        self._pinned: PinnedMemory | None = None

    @property
    def waiting(self) -> int:
        return self._grants.waiting

    @property
    def slow(self) -> frozenset[str]:
        return self._grants.slow

    def follow(self, plan: NodePlan, told: bool = False) -> None:
        """Keep to this node's part of ``plan`` from now on. ``told``: :meth:`on_arrived` will be called."""
        with self._guard:
            self._told = self._told or told
            self._ranges = dict(enumerate(cut_pieces(self.window.cut, plan.pieces)))
            self._grants.follow(plan.sends, plan.known_piece_s, plan.near)
            self._pump()

    def on_arrived(self) -> None:
        """Leaves have arrived on this machine."""
        with self._guard:
            self._pump()
            self._set_timer()
            self._came.notify_all()

    def await_bytes(self, offset: int, end: int, waiting: Callable[[], None]) -> int:
        """Where the bytes that are here from ``offset`` on end, ``end`` at most; waits for some, calling ``waiting``
        again and again (it may raise to give up)."""
        while (there := self._there(offset, end)) == offset < end:
            waiting()
            with self._guard:
                if self._there(offset, end) == offset:
                    self._came.wait(_WAKE_S if self._told else _LOOK_S)
        return there

    def _there(self, offset: int, end: int) -> int:
        size = self.window.cut.leaf_bytes
        while offset < end and self.window.has(range(offset // size, offset // size + 1)):
            offset = min(end, (offset // size + 1) * size)
        return offset

    def offer(self, network: OneSidedNetwork, offset: int) -> bytes:
        """Opens the window to one-sided reads."""
        with self._guard:
            self._pinned = self._pinned or self.window.pin()
            return network.offer(self._pinned.span, offset)

    def close(self, networks: Iterable[OneSidedNetwork]) -> None:
        """Nobody pulls any more."""
        with self._guard:
            if self._pinned is not None:
                for network in networks:
                    network.forget(self._pinned.span)
                self._pinned.close()
                self._pinned = None

    def holds(self, get: Get) -> bool:
        return self.window.has(self.window.cut.holding(get.offset, get.offset + get.nbytes))

    @contextmanager
    def turn(self, get: Get, waiting: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Waits until ``get`` may start, calling ``waiting`` again and again (it may raise to give up), then yields;
        the link is the caller's until it leaves. The caller calls what is yielded once the transfer is complete."""
        pull = (get.node, get.piece)
        turn = self._ask(get, pull)
        complete = False

        def completed() -> None:
            nonlocal complete
            complete = True

        try:
            while not self._may_start(turn):
                waiting()
            yield completed
        finally:
            with self._guard:
                if self._turns.get(pull) is turn:
                    del self._turns[pull]
                    self._grants.end(pull, time.monotonic(), complete)
                self._pump()
                self._set_timer()

    def _ask(self, get: Get, pull: Pull) -> _Turn:
        """Queues a pull. One that asks again on a new connection has given up the old one."""
        with self._guard:
            now_s = self.touched_s = time.monotonic()
            leaves = self.window.cut.holding(get.offset, get.offset + max(get.nbytes, 1))
            self._ranges.setdefault(get.piece, leaves)
            before = self._turns.pop(pull, None)
            if before is not None:
                before.withdrawn = True
                before.changed.notify_all()
                self._grants.end(pull, now_s, complete=False)
            turn = self._turns[pull] = _Turn(self._guard)
            self._grants.ask(pull, now_s, get.scheduled)
            return turn

    def _may_start(self, turn: _Turn) -> bool:
        with self._guard:
            now_s = time.monotonic()
            self._pump()
            if not turn.granted and not turn.withdrawn:
                turn.changed.wait(min(self._grants.quiet_s(now_s), _WAKE_S if self._told else _LOOK_S))
            if turn.withdrawn:
                raise EOFError("the puller asked again on another connection")
            return turn.granted

    def _set_timer(self) -> None:
        """Has one of those that wait sleep no longer than until time alone lets a pull through."""
        if self._grants.quiet_s(time.monotonic()) < _WAKE_S:
            for turn in self._turns.values():
                if not turn.granted:
                    turn.changed.notify_all()
                    return

    def _holds(self, piece: int) -> bool:
        """Whether a transfer of the piece may start: it is here, or all but its last leaf, which will be here before
        its turn comes. So what a piece costs between its last byte and the next node's first adds up for no hop."""
        leaves = self._ranges.get(piece)
        return leaves is not None and self.window.has(leaves[:-1] if len(leaves) > 1 else leaves)

    def _pump(self) -> None:
        """Lets through what may start now. Call with ``_guard`` held."""
        while (pull := self._grants.grant_next(time.monotonic())) is not None:
            turn = self._turns[pull]
            turn.granted = True
            turn.changed.notify_all()
