"""KV from the pool of another machine: a second kind of thing that the weights' transport carries.

::

    asker                                      holder
    "kv-list"  fingerprint, node  ----------->  spaces of these weights, their pieces, what computing them takes
    "kv-offer" names        ----------------->  the pieces in one window of memory, as they lie in their files
    pulls the window (prism.transfer), verified leaf by leaf
    "kv-done"  window       ----------------->  its memory is free
    "kv-taken" fingerprint, node, bytes  ---->  nothing more is asked for: so much of what was listed is there now
    "kv-broken" fingerprint, node        ---->  over another connection: this one cannot go on

What arrives is put into the pool of the asker piece by piece, as it comes, where engines find it by the tokens; what
has not come when the holder is lost is computed.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import msgspec
import numpy as np

from prism.kv.host_pool import HostPool
from prism.kv.naming import PieceName
from prism.kv.piece_file import PieceBytes
from prism.kv.pool_directory import SpaceNote
from prism.kv.taking import TakerNews
from prism.policy.moving import Leg, Way, choose_way
from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.incoming import IncomingWindow, PullOptions
from prism.transfer.memory_window import MemoryWindow, MemoryWindows
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import Answerer, TransferServer
from prism.transfer.session import NodePlan

LIST, OFFER, DONE, TAKEN, BROKEN = "kv-list", "kv-offer", "kv-done", "kv-taken", "kv-broken"
LEAF_BYTES: Final = 256 << 10
MOST_BYTES: Final = 64 << 20
"""Of one window: what both machines hold in addition while it is sent."""
_OFFERED_S: Final = 60.0
"""An asker that has not come for its window by then is gone."""
_ANSWER_S: Final = 30.0
_SAY_S: Final = 2.0
"""For telling a holder that its connection broke; it finds out by itself, a little later."""
_WAIT_S: Final = 0.1


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of KV that another machine could have."""

    space: str
    file: str
    nbytes: int

    @property
    def piece(self) -> PieceName:
        """Its name in the pool. Raises :class:`PeerError` for what is no piece's."""
        position, _, key = self.file.partition("-")
        if not (_is_hex(position, 6) and _is_hex(key, 32) and _is_hex(self.space, 32)):
            raise PeerError("peer", f"names {self.space}/{self.file}, which is no piece of KV")
        return PieceName.of_file(int(position, 16), key)


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and all(c in "0123456789abcdef" for c in text)


class HeldSpace(msgspec.Struct, frozen=True, kw_only=True):
    """All pieces of one space, those used last first."""

    recompute_s_per_byte: float
    weights: str
    pieces: list[HeldPiece]


class _OfferedKv(MemoryWindow):
    """Says so when a leaf of it has gone out."""

    on_sent: Callable[[], None]

    @classmethod
    def of(cls, memory: memoryview, on_sent: Callable[[], None]) -> _OfferedKv:
        made = cls.over(memory, LEAF_BYTES)
        assert isinstance(made, cls)
        made.on_sent = on_sent
        return made

    def send(self, sock: socket.socket, first: int, end: int) -> None:
        for at in range(first, end, LEAF_BYTES):
            super().send(sock, at, min(at + LEAF_BYTES, end))
            self.on_sent()


class KvOffers:
    """A machine's side of it: answers questions, has the windows that go out and come in. Safe in several threads."""

    def __init__(self, pool: HostPool, leave_session: Callable[[str], None]) -> None:
        """``leave_session`` is the server's (:meth:`TransferServer.leave_session`)."""
        self.pool, self._leave_session = pool, leave_session
        self.windows = MemoryWindows()
        self._machine = os.urandom(8).hex()
        """In the names of windows, which several machines may have at a time."""
        self._guard = threading.Lock()
        self._offered: dict[str, float] = {}
        self._numbers = itertools.count()
        self.taking = TakerNews()
        """Since :meth:`hand_over`."""

    def hand_over(self) -> dict[str, int]:
        """Nothing more is stored here. Returns the bytes there are by fingerprint; who asks for them from now on is
        noted in :attr:`taking`."""
        self.taking.begin()
        return self.pool.held_bytes()

    def answerers(self) -> Mapping[str, Answerer]:
        return {LIST: self._list, OFFER: self._offer, DONE: self._done, TAKEN: self._taken, BROKEN: self._broken}

    def _list(self, body: bytes) -> bytes:
        fingerprint, node = _decoded(body, tuple[str, str], "peer")
        self.taking.listed(fingerprint, node)
        spaces = []
        for space in self.pool.spaces(fingerprint):
            note = self.pool.note(space)
            held = [HeldPiece(space, p.name.partition("/")[2], p.nbytes) for p in self.pool.pieces(space)]
            spaces.append(HeldSpace(recompute_s_per_byte=note.recompute_s_per_byte, weights=note.weights, pieces=held))
        return msgspec.msgpack.encode(spaces)

    def _offer(self, body: bytes) -> bytes:
        """The window's name and, for each piece asked for, its bytes in it (0: it is gone)."""
        wanted = msgspec.msgpack.decode(body, type=list[HeldPiece])
        parts = [self._read(held) for held in wanted]
        memory = bytearray().join(parts)
        name = f"kv/{self._machine}-{next(self._numbers)}"
        self._forget(time.monotonic() - _OFFERED_S)
        if memory:
            marks = {self.pool.note(held.space).weights.split(" ")[0] for held in wanted}
            self.taking.heard(*marks)
            self.windows.offer(name, _OfferedKv.of(memoryview(memory), lambda: self.taking.heard(*marks)))
            with self._guard:
                self._offered[name] = time.monotonic()
        return msgspec.msgpack.encode((name, [len(part) for part in parts]))

    def _read(self, held: HeldPiece) -> bytes:
        with self.pool.opened(held.space, held.piece) as place:
            return b"" if place is None else bytes(place.memory)

    def _done(self, body: bytes) -> bytes:
        name, session = _decoded(body, tuple[str, str], "peer")
        self.windows.withdraw(name)
        self._leave_session(session)
        with self._guard:
            self._offered.pop(name, None)
        return b""

    def _taken(self, body: bytes) -> bytes:
        fingerprint, node, nbytes = _decoded(body, tuple[str, str, int], "peer")
        self.taking.took(fingerprint, node, nbytes)
        return b""

    def _broken(self, body: bytes) -> bytes:
        self.taking.broke(*_decoded(body, tuple[str, str], "peer"))
        return b""

    def _forget(self, before_s: float) -> None:
        with self._guard:
            old = [name for name, at_s in self._offered.items() if at_s < before_s]
            for name in old:
                del self._offered[name]
        for name in old:
            self.windows.withdraw(name)


def fetch_kv(
    mine: KvOffers,
    server: TransferServer,
    holder: tuple[str, str],
    fingerprint: str,
    link_bytes_per_s: float,
    most_bytes: int,
) -> int:
    """Bring KV of the weights ``fingerprint`` from ``holder`` (name and address) into this machine's pool: what was
    used last first, as far as that takes less than computing it and within ``most_bytes``. ``server`` is this
    machine's, with ``mine`` among its windows. Returns the bytes that came. Raises :class:`PeerError`,
    :class:`SourceLost`, ``OSError``, ``EOFError``."""
    node, address = holder
    peer = PeerConnection(node, address, server.secret, server.node, _ANSWER_S)
    came = 0
    try:
        question = msgspec.msgpack.encode((fingerprint, server.node))
        spaces: list[HeldSpace] = _decoded(peer.ask(LIST, question, _ANSWER_S), list[HeldSpace], node)
        with _saying_what_came(mine.pool, server, peer, fingerprint, spaces):
            for space in spaces:
                note = SpaceNote(weights=space.weights, recompute_s_per_byte=space.recompute_s_per_byte)
                before = came
                for batch in _batches(space, mine.pool, link_bytes_per_s, most_bytes - came):
                    for nbytes in _fetch_batch(mine, server, peer, batch):
                        if came == before:
                            mine.pool.note_space(batch[0].space, note)
                        came += nbytes
    finally:
        peer.close()
    return came


@contextmanager
def _saying_what_came(
    pool: HostPool, server: TransferServer, peer: PeerConnection, fingerprint: str, spaces: Sequence[HeldSpace]
) -> Iterator[None]:
    """A holder that leaves does not wait for who has all it wants, and asks another one where something went wrong."""
    try:
        yield
    except (PeerError, SourceLost, OSError, EOFError):
        with suppress(PeerError, SourceLost, OSError, EOFError), closing(_connected(server, peer, _SAY_S)) as anew:
            anew.ask(BROKEN, msgspec.msgpack.encode((fingerprint, server.node)), _SAY_S)
        raise
    here = sum(held.nbytes for space in spaces for held in space.pieces if pool.has(held.space, held.piece))
    with suppress(PeerError, SourceLost, OSError, EOFError):  # it is gone, or finds out that nothing comes any more
        peer.ask(TAKEN, msgspec.msgpack.encode((fingerprint, server.node, here)), _ANSWER_S)


def _connected(server: TransferServer, peer: PeerConnection, dead_s: float) -> PeerConnection:
    return PeerConnection(peer.node, peer.address, server.secret, server.node, dead_s)


def _batches(space: HeldSpace, pool: HostPool, bytes_per_s: float, most_bytes: int) -> list[list[HeldPiece]]:
    """What of ``space`` is worth bringing and not here, in windows' worths."""
    batches: list[list[HeldPiece]] = []
    room = 0
    for held in space.pieces:
        if pool.has(held.space, held.piece) or held.nbytes > most_bytes:
            continue
        # A byte takes the space's time to compute: as if it were so many tokens of a prefill at 1 token/s.
        choice = choose_way((Leg(held.nbytes, bytes_per_s),), held.nbytes, 1.0 / max(space.recompute_s_per_byte, 1e-15))
        if choice.way is Way.RECOMPUTE:
            continue
        if held.nbytes > room:
            batches.append([])
            room = MOST_BYTES
        batches[-1].append(held)
        room -= held.nbytes
        most_bytes -= held.nbytes
    return batches


def _fetch_batch(
    mine: KvOffers, server: TransferServer, peer: PeerConnection, batch: Sequence[HeldPiece]
) -> Iterator[int]:
    """The bytes of each piece, when it has been stored."""
    answer = peer.ask(OFFER, msgspec.msgpack.encode(list(batch)), _ANSWER_S)
    sizes: list[int]
    name, sizes = _decoded(answer, tuple[str, list[int]], peer.node)
    if sum(sizes) == 0:
        return
    try:
        landing = MemoryWindow.described(peer.describe(name))
        if landing.cut.nbytes != sum(sizes) or len(sizes) != len(batch):
            raise PeerError(peer.node, f"has {landing.cut.nbytes} bytes for {len(sizes)} of {len(batch)} pieces")
        with closing(_coming(mine, server, peer, name, landing, sizes)) as parts:
            for held, part in zip(batch, parts, strict=True):
                if len(part) and mine.pool.put(held.space, held.piece, len(part), _writing(part)):
                    yield len(part)
    finally:
        peer.ask(DONE, msgspec.msgpack.encode((name, _session(name, server))), _ANSWER_S)


def _writing(part: memoryview) -> Callable[[PieceBytes], None]:
    return lambda place: place.write(np.frombuffer(part, dtype=np.uint8), 0)


def _coming(
    mine: KvOffers,
    server: TransferServer,
    peer: PeerConnection,
    name: str,
    landing: MemoryWindow,
    sizes: Sequence[int],
) -> Generator[memoryview]:
    """The parts of ``landing``, of ``sizes``, one after the other as they come."""
    session = _session(name, server)
    leaf = end = 0
    mine.windows.offer(name, landing)
    plan = NodePlan(
        session=session,
        window=name,
        node=server.node,
        addresses={peer.node: peer.address, server.node: server.address},
        sources=(peer.node,),
        pieces=min(16, landing.cut.leaves),
    )
    incoming = IncomingWindow(server, plan, landing, PullOptions())
    try:
        for nbytes in sizes:
            end += nbytes
            while leaf * landing.cut.leaf_bytes < end:
                _await(incoming, leaf, peer.node)
                leaf += 1
            yield landing.data[end - nbytes : end]
    finally:
        incoming.close()
        mine.windows.withdraw(name)
        server.leave_session(session)


def _session(name: str, server: TransferServer) -> str:
    return f"{name}@{server.node}"


def _await(incoming: IncomingWindow, leaf: int, node: str) -> None:
    while not incoming.await_leaf(leaf, _WAIT_S):
        if incoming.failed is not None:
            raise incoming.failed
        if incoming.stopped:
            raise SourceLost(f"{node} stopped sending {incoming.plan.window}")


def _decoded(answer: bytes, kind: Any, node: str) -> Any:
    try:
        return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(node, f"sent what is no answer about KV: {error}") from error
