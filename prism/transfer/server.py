"""Offering this machine's windows to others: accepts connections, proves, answers, lets pulls through in the plan's
order.

One thread per connection; the node that pulls decides what it wants, this side only when
(:mod:`prism.transfer.grants`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from prism.core.errors import PrismError
from prism.transfer.auth import admit_client
from prism.transfer.errors import PeerError
from prism.transfer.frames import (
    AnyFrame,
    Arrival,
    Declined,
    Describe,
    Described,
    Get,
    GetArrival,
    Handover,
    OwnerAnswer,
    OwnerQuestion,
    Queued,
    Warm,
    recv_frame,
    send_frame,
)
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.outgoing import OutgoingSession
from prism.transfer.sending import PING_S, SEND_TIMEOUT_S, raise_if_closed, send_in_turn, send_warmth
from prism.transfer.session import NodePlan
from prism.transfer.windows import THERE, OfferedWindow, WindowSource

JOIN_WAIT_S: Final = 2.0
logger = logging.getLogger(__name__)


Answerer = Callable[[bytes], bytes]
"""Answers a question of the windows' owner, in a thread of its own and for as long as it takes. What it raises (a
:class:`PrismError`, ``OSError``) is told to the asker."""
Taker = Callable[[bytes, socket.socket], bytes]
"""Takes a proven connection, given what its other end said of it, and answers; it duplicates what it keeps. Raises
like an :data:`Answerer`."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server offers beside windows over TCP."""

    networks: Sequence[OneSidedNetwork] = ()
    answerers: Mapping[str, Answerer] = field(default_factory=dict)
    """By topic (:class:`prism.transfer.frames.Ask`)."""


class TransferServer:
    """Offers the windows of ``source`` at ``bind`` (``HOST:PORT``; port 0 picks one) until :meth:`close`. ``node``
    names this machine; only peers that know ``secret`` are answered. ``sent_bytes`` counts per receiving node."""

    def __init__(
        self, source: WindowSource, bind: str, secret: bytes, node: str, options: ServerOptions | None = None
    ) -> None:
        options = options or ServerOptions()
        self.node, self.secret, self._source = node, secret, source
        self.networks = {network.name: network for network in options.networks}
        self._answerers = dict(options.answerers)
        self._takers: dict[str, Taker] = {}
        host, _, port = bind.rpartition(":")
        self._listener = socket.create_server((host, int(port)), backlog=256)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.sent_bytes: dict[str, int] = {}
        self._sessions: dict[str, OutgoingSession] = {}
        self._windows: dict[str, OfferedWindow] = {}
        self._guard = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept_all, name="transfer-accept", daemon=True).start()

    def answer(self, topic: str, answerer: Answerer, taker: Taker) -> None:
        """From now on questions and connections of this topic are answered so."""
        self._answerers[topic], self._takers[topic] = answerer, taker

    def join_session(self, plan: NodePlan, told: bool = False) -> None:
        """From now on pulls of this session go in the plan's order. Sources call this; a reception does it
        itself (``told``: and calls :meth:`on_arrived`). Raises :class:`PeerError` when the window is not here."""
        self._session(plan.session, plan.window).follow(plan, told)

    def on_arrived(self, session: str) -> None:
        """Leaves of the session's window arrived here: pulls that wait for them may go on."""
        outgoing = self._sessions.get(session)
        if outgoing is not None:
            outgoing.on_arrived()

    def leave_session(self, session: str) -> None:
        """Forgets a session; its window may be closed."""
        with self._guard:
            gone = [s for s in (self._sessions.pop(session, None),) if s is not None]
            used = {s.name for s in self._sessions.values()}
            unused = [self._windows.pop(name) for name in list(self._windows) if name not in used]
        for window in unused:
            window.close()
        for outgoing in gone:
            outgoing.close(self.networks.values())

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
            self.leave_session(session)

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(sock,), name="transfer-serve", daemon=True).start()

    def _connection(self, sock: socket.socket) -> None:
        with self._guard:
            self._sockets.add(sock)
        peer = "peer"
        try:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(SEND_TIMEOUT_S)
                peer = admit_client(sock, self.secret, self.node, ("tcp", *self.networks))
                while True:
                    sock.settimeout(None)  # an idle puller may keep its connection
                    question = recv_frame(sock)
                    sock.settimeout(SEND_TIMEOUT_S)
                    if isinstance(question, Handover):
                        self._hand_over(sock, question)
                        return
                    self._answer(sock, question)
        except (OSError, EOFError):
            logger.debug("%s: connection of %s ended", self.node, peer)
        except PrismError as error:
            logger.warning("%s: dropped %s: %s", self.node, peer, error)
        finally:
            with self._guard:
                self._sockets.discard(sock)

    def _answer(self, sock: socket.socket, question: AnyFrame) -> None:
        match question:
            case Describe(window=name):
                description = self._source.describe(name)
                send_frame(sock, Described(raw=description.raw if description else b""))
            case GetArrival(window=name):
                send_frame(sock, self._arrival(name))
            case Get():
                self._send(sock, question)
            case Warm(nbytes=nbytes):
                send_warmth(sock, nbytes)
            case OwnerQuestion():
                self._answer_owner(sock, question)
            case _:
                raise PeerError(self.node, f"was sent {type(question).__name__}, which is no question")

    def _answer_owner(self, sock: socket.socket, question: OwnerQuestion) -> None:
        """Has a question answered, saying all the while that this machine lives."""
        answerer = self._answerers.get(question.topic)
        if answerer is None:
            send_frame(sock, Declined(reason=f"knows nothing of {question.topic!r}"))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="transfer-answer") as thread:
            answer = thread.submit(answerer, question.body)
            while not wait([answer], PING_S).done:
                send_frame(sock, Queued(held=False))
        try:
            body = answer.result()
        except (OSError, PrismError) as error:
            send_frame(sock, Declined(reason=str(error)))
            return
        send_frame(sock, OwnerAnswer(body=body))

    def _hand_over(self, sock: socket.socket, question: Handover) -> None:
        """Afterwards this server has nothing to do with the connection; closing its own descriptor does not end it."""
        with self._guard:
            self._sockets.discard(sock)
        taker = self._takers.get(question.topic)
        if taker is None:
            send_frame(sock, Declined(reason=f"takes no connections for {question.topic!r}"))
            return
        try:
            answer = taker(question.body, sock)
        except (OSError, PrismError) as error:
            send_frame(sock, Declined(reason=str(error)))
            return
        send_frame(sock, OwnerAnswer(body=answer))

    def _arrival(self, name: str) -> Arrival:
        with self._guard:
            window = self._windows.get(name)
            waiting = sum(s.waiting for s in self._sessions.values())
            slow = tuple(frozenset().union(*(s.slow for s in self._sessions.values())))
        if window is not None:
            return Arrival(leaves=window.arrival_map(), waiting=waiting, slow=slow)
        description = self._source.describe(name)  # here, but not in use: it is opened with the first pull
        return Arrival(leaves=bytes([THERE]) * (description.leaves if description else 0), waiting=waiting)

    def _send(self, sock: socket.socket, get: Get) -> None:
        try:
            outgoing = self._await_session(sock, get)
        except PeerError as error:
            send_frame(sock, Declined(reason=str(error)))
            return
        if get.offset < 0 or get.nbytes < 0 or get.offset + get.nbytes > outgoing.window.cut.nbytes:
            send_frame(sock, Declined(reason=f"bytes {get.offset}..{get.offset + get.nbytes} are outside the window"))
            return
        send_in_turn(sock, get, outgoing, self.networks.get(get.network))
        self.sent_bytes[get.node] = self.sent_bytes.get(get.node, 0) + get.nbytes

    def _await_session(self, sock: socket.socket, get: Get) -> OutgoingSession:
        """The session of a pull. A puller may be quicker than this node's own part of the session, so a window that is
        not here yet is waited for."""
        give_up_s = time.monotonic() + JOIN_WAIT_S
        while True:
            try:
                return self._session(get.session, get.window)
            except PeerError:
                if time.monotonic() > give_up_s:
                    raise
            send_frame(sock, Queued(held=False))
            raise_if_closed(sock)
            time.sleep(PING_S / 5)

    def _session(self, session: str, name: str) -> OutgoingSession:
        with self._guard:
            outgoing = self._sessions.get(session)
            if outgoing is not None:
                return outgoing
            window = self._windows.get(name) or self._source.open(name)
            if window is None:
                raise PeerError(self.node, f"does not have {name}")
            self._windows[name] = window
            outgoing = self._sessions[session] = OutgoingSession(name, window)
            return outgoing
