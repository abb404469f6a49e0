"""Serving this machine's packs to others: accepts connections, proves, answers, lets pulls through in the plan's order.

One thread per connection; the node that pulls decides what it wants, this side only when
(:mod:`prism.transfer.grants`).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, Protocol

from prism.transfer.auth import admit_client
from prism.transfer.frames import (
    AnyFrame,
    Arrival,
    Data,
    Done,
    Files,
    Get,
    GetArrival,
    GetFiles,
    GetHeader,
    Header,
    PackFolder,
    Queued,
    Refused,
    Warm,
    expect,
    recv_frame,
    send_frame,
)
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.outgoing import OutgoingSession
from prism.transfer.session import NodePlan
from prism.weights.errors import PeerError, WeightsError
from prism.weights.packs.format import PackHeader, PackKey, encode_header
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore

PING_S: Final = 0.1
SEND_TIMEOUT_S: Final = 5.0
"""A puller that takes no byte for this long is dropped."""
JOIN_WAIT_S: Final = 2.0
DRIVE_S: Final = 0.0005
MOST_WARM_BYTES: Final = 4 << 20
logger = logging.getLogger(__name__)


class SmallFile(Protocol):
    """One file of a model's folder."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> bytes: ...


class FolderOffer(Protocol):
    """See :class:`prism.weights.exchange.model_folders.Folders`."""

    def small_files(self, path: str, mark: str) -> Sequence[SmallFile]: ...
    def packed(self, path: str, mark: str) -> PackHeader | None: ...


class WeightServer:
    """Serves ``store`` at ``bind`` (``HOST:PORT``; port 0 picks one) until :meth:`close`. ``node`` names this machine;
    only peers that know ``secret`` are answered. ``movers`` are networks to offer beside TCP. ``sent_bytes`` counts
    per receiving node."""

    def __init__(
        self,
        store: WeightStore,
        bind: str,
        secret: bytes,
        node: str,
        movers: Sequence[OneSidedNetwork] = (),
        folders: FolderOffer | None = None,
    ) -> None:
        """``folders`` are the model folders that others may ask for."""
        self.store, self.node, self.secret, self._folders = store, node, secret, folders
        self.movers = {mover.name: mover for mover in movers}
        host, _, port = bind.rpartition(":")
        self._listener = socket.create_server((host, int(port)), backlog=256)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.sent_bytes: dict[str, int] = {}
        self._sessions: dict[str, OutgoingSession] = {}
        self._packs: dict[PackKey, ResidentPack] = {}
        self._guard = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def join(self, plan: NodePlan, told: bool = False) -> None:
        """From now on pulls of this session go in the plan's order. Sources call this; a receiver's fetch does it
        itself (``told``: and calls :meth:`arrived`). Raises :class:`PeerError` when the pack is not here."""
        self._serving(plan.session, plan.key).follow(plan, told)

    def arrived(self, session: str) -> None:
        """Pieces of the session's pack arrived here: pulls that wait for them may go on."""
        serving = self._sessions.get(session)
        if serving is not None:
            serving.arrived()

    def leave(self, session: str) -> None:
        """Forgets a session; its pack may be reclaimed again."""
        with self._guard:
            gone = [s for s in (self._sessions.pop(session, None),) if s is not None]
            used = {s.packed.key for s in self._sessions.values()}
            unused = [self._packs.pop(key) for key in list(self._packs) if key not in used]
        for packed in unused:
            packed.close()
        for serving in gone:
            serving.close(self.movers.values())

    def close(self) -> None:
        """Stops listening and drops every connection."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            sessions = list(self._sessions)
        for session in sessions:
            self.leave(session)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(sock,), name="weights-serve", daemon=True).start()

    def _connection(self, sock: socket.socket) -> None:
        with self._guard:
            self._sockets.add(sock)
        peer = "peer"
        try:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(SEND_TIMEOUT_S)
                peer = admit_client(sock, self.secret, self.node, ("tcp", *self.movers))
                while True:
                    sock.settimeout(None)  # an idle puller may keep its connection
                    question = recv_frame(sock)
                    sock.settimeout(SEND_TIMEOUT_S)
                    self._answer(sock, question)
        except (OSError, EOFError):
            logger.debug("%s: connection of %s ended", self.node, peer)
        except WeightsError as error:
            logger.warning("%s: dropped %s: %s", self.node, peer, error)
        finally:
            with self._guard:
                self._sockets.discard(sock)

    def _answer(self, sock: socket.socket, question: AnyFrame) -> None:
        match question:
            case GetHeader(key=key):
                header = self.store.header(key)
                send_frame(sock, Header(raw=encode_header(header) if header else b""))
            case GetArrival(key=key):
                send_frame(sock, self._arrival(key))
            case Get():
                self._send(sock, question)
            case Warm(nbytes=nbytes):
                _warm(sock, min(max(nbytes, 0), MOST_WARM_BYTES))
            case GetFiles(path=path, mark=mark):
                found = self._folders.small_files(path, mark) if self._folders is not None else []
                send_frame(sock, Files(files=[(file.name, file.data) for file in found]))
            case PackFolder():
                self._pack(sock, question)
            case _:
                raise PeerError(self.node, f"was sent {type(question).__name__}, which is no question")

    def _pack(self, sock: socket.socket, question: PackFolder) -> None:
        """Packs a folder, saying all the while that this machine lives."""
        if self._folders is None:
            send_frame(sock, Header(raw=b""))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="weights-pack") as thread:
            header = thread.submit(self._folders.packed, question.path, question.mark)
            while not wait([header], PING_S).done:
                send_frame(sock, Queued(held=False))
        try:
            found = header.result()
        except (OSError, WeightsError) as error:
            send_frame(sock, Refused(reason=str(error)))
            return
        send_frame(sock, Header(raw=encode_header(found) if found else b""))

    def _arrival(self, key: PackKey) -> Arrival:
        with self._guard:
            packed = self._packs.get(key)
            waiting = sum(s.waiting for s in self._sessions.values())
            slow = tuple(frozenset().union(*(s.slow for s in self._sessions.values())))
        if packed is not None:
            return Arrival(leaves=packed.arrival_bytes(), waiting=waiting, slow=slow)
        header = self.store.header(key)  # here, but not in use: reading it into memory begins with the first pull
        return Arrival(leaves=b"\1" * header.leaves if header else b"", waiting=waiting)

    def _send(self, sock: socket.socket, get: Get) -> None:
        try:
            serving = self._await_serving(sock, get)
        except PeerError as error:
            send_frame(sock, Refused(reason=str(error)))
            return
        if get.offset < 0 or get.nbytes < 0 or get.offset + get.nbytes > serving.packed.header.data_bytes:
            send_frame(sock, Refused(reason=f"bytes {get.offset}..{get.offset + get.nbytes} are outside the pack"))
            return
        pinged_s = time.monotonic()

        def waiting() -> None:
            nonlocal pinged_s
            now_s = time.monotonic()
            if now_s - pinged_s >= PING_S:
                pinged_s = now_s
                send_frame(sock, Queued(held=serving.holds(get)))
            _raise_if_closed(sock)

        with serving.turn(get, waiting) as completed:
            mover = self.movers.get(get.mover)
            if mover is None:
                self._stream(sock, serving, get, waiting)
            else:
                at, end = get.offset, get.offset + get.nbytes
                while at < end:  # a one-sided read takes no notice of what is not here yet
                    at = serving.await_bytes(at, end, waiting)
                send_frame(sock, Data(nbytes=get.nbytes, descriptor=serving.offer(mover, get.offset)))
                _drive(sock, mover)
            expect(sock, Done)
            completed()
        self.sent_bytes[get.node] = self.sent_bytes.get(get.node, 0) + get.nbytes

    def _stream(self, sock: socket.socket, serving: OutgoingSession, get: Get, waiting: Callable[[], None]) -> None:
        """Sends what is here and the rest as it arrives, each part announced: in between there is room to say that this
        node is alive."""
        at, end = get.offset, get.offset + get.nbytes
        while True:
            there = serving.await_bytes(at, end, waiting)
            send_frame(sock, Data(nbytes=there - at))
            serving.packed.send(sock, at, there)
            at = there
            if at == end:
                return

    def _await_serving(self, sock: socket.socket, get: Get) -> OutgoingSession:
        """The session's serving. A puller may be quicker than this node's own part of the session, so a pack that is
        not here yet is waited for."""
        give_up_s = time.monotonic() + JOIN_WAIT_S
        while True:
            try:
                return self._serving(get.session, get.key)
            except PeerError:
                if time.monotonic() > give_up_s:
                    raise
            send_frame(sock, Queued(held=False))
            _raise_if_closed(sock)
            time.sleep(PING_S / 5)

    def _serving(self, session: str, key: PackKey) -> OutgoingSession:
        with self._guard:
            serving = self._sessions.get(session)
            if serving is not None:
                return serving
            packed = self._packs.get(key) or self.store.get(key)
            if packed is None:
                raise PeerError(self.node, f"does not have {key.model} {key.layout}")
            self._packs[key] = packed
            serving = self._sessions[session] = OutgoingSession(packed)
            return serving


def _warm(sock: socket.socket, nbytes: int) -> None:
    send_frame(sock, Data(nbytes=nbytes))
    sock.sendall(bytes(nbytes))


def _drive(sock: socket.socket, mover: OneSidedNetwork) -> None:
    """Keeps a one-sided transfer going until its puller says something, telling it all the while that we are alive."""
    pinged_s = time.monotonic()
    while not select.select([sock], [], [], DRIVE_S)[0]:
        mover.progress()
        if time.monotonic() - pinged_s >= PING_S:
            pinged_s = time.monotonic()
            send_frame(sock, Queued(held=True))


def _raise_if_closed(sock: socket.socket) -> None:
    """A puller that gave up closes its connection; nothing else is sent while it waits."""
    sock.settimeout(0.0)
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            raise EOFError("the puller gave up")
    except BlockingIOError:
        pass
    finally:
        sock.settimeout(SEND_TIMEOUT_S)
