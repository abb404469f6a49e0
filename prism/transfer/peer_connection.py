"""The pulling side of a connection to another machine."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prism.transfer.auth import prove_to_server
from prism.transfer.errors import PeerError
from prism.transfer.frames import (
    Arrival,
    Data,
    Declined,
    Describe,
    Described,
    Done,
    Get,
    GetArrival,
    Handover,
    OwnerAnswer,
    OwnerQuestion,
    Queued,
    Warm,
    expect,
    expect_more,
    recv_exactly,
    recv_frame,
    send_frame,
)

NEARLY_BYTES: Final = 256 << 10
"""With this much of a transfer left (a sixteenth of a small one) the next one is asked for and the source may go on to
its next receiver: the link never idles for a round trip and two threads' wake-ups. More than a few percent would make
receivers share links."""
WAKE_BYTES: Final = 128 << 10
MOST_WAKE_BYTES: Final = 512 << 10
WAKE_S: Final = 0.01
"""The reader of a stream is woken when so many bytes have come, or what comes in this time if that is more (a wake-up
costs as much as copying 100 KiB), and at the end of each leaf, which can be passed on then."""
WINDOW_BYTES: Final = 2 << 20
"""What may be under way before the reader wakes up, from the first byte on."""


class TooLate(PeerError):
    """The source is alive but did not let the pull start in time."""


class TooSlow(PeerError):
    """The transfer runs far below what others reach: ``nbytes`` in ``took_s``."""

    def __init__(self, peer: str, nbytes: int, took_s: float) -> None:
        self.nbytes, self.took_s = nbytes, took_s
        super().__init__(peer, f"sent {nbytes} bytes in {took_s:.2f} s")


@dataclass(frozen=True, slots=True)
class PullTerms:
    """One transfer at the puller: where it goes, and how long it may take."""

    into: memoryview
    to_leaf_end: int
    """Bytes of ``into`` up to the first end of a leaf, and ..."""
    leaf_bytes: int
    """... between such ends from there on."""
    overdue: Callable[[float], bool]
    """:class:`TooLate` when this says so of the seconds it has waited for the source."""
    half_s: float
    """:class:`TooSlow` when less than half was here this long after its start, or not all after twice as long, time in
    which the source itself waited for the bytes not counted."""
    on_nearly: Callable[[], None]
    """Called once, when little or nothing is left."""
    on_bytes: Callable[[int], None]
    """Called with the number of bytes that came."""
    read: Callable[[bytes, Callable[[], None]], None] | None = None
    """Carries out a one-sided read, given the server's descriptor."""


class PeerConnection:
    """One connection. ``dead_s``: silence after which the other side counts as dead. Not for several threads."""

    def __init__(self, node: str, address: str, secret: bytes, me: str, dead_s: float) -> None:
        self.node, self.address = node, address
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), timeout=dead_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lowat = 1
        self.asked_s: float | None = None
        """Since when a question of :meth:`ask_arrival` is open."""
        self._wake_at(WINDOW_BYTES)  # makes the kernel open its window that far, and still widen it as it sees fit
        self._wake_at(1)
        try:
            self._sock.settimeout(dead_s)
            self.networks = prove_to_server(self._sock, secret, me).networks
        except BaseException:
            self._sock.close()
            raise

    def close(self) -> None:
        self._sock.close()

    def describe(self, window: str) -> bytes:
        """See :class:`prism.transfer.windows.Description`; empty if the peer does not have the window."""
        send_frame(self._sock, Describe(window=window))
        return expect(self._sock, Described).raw

    def ask(self, topic: str, body: bytes, timeout_s: float) -> bytes:
        """The answer to a question of the windows' owner. Raises :class:`PeerError` for a refusal and after
        ``timeout_s``."""
        send_frame(self._sock, OwnerQuestion(topic=topic, body=body))
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            match recv_frame(self._sock):
                case Queued():
                    continue
                case OwnerAnswer(body=answer):
                    return answer
                case Declined(reason=reason):
                    raise PeerError(self.node, f"refused: {reason}")
                case frame:
                    raise PeerError(self.node, f"sent {type(frame).__name__} instead of an answer")
        raise PeerError(self.node, f"has not answered {topic!r} after {timeout_s:.0f} s")

    def hand_over(self, topic: str, body: bytes, timeout_s: float) -> tuple[bytes, socket.socket]:
        """The answer of the other side's owner, which has its end of this connection from now on, and this end, which
        the caller closes. Raises :class:`PeerError`, ``OSError`` and ``EOFError``; the connection is closed then."""
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, Handover(topic=topic, body=body))
            answer = expect(self._sock, OwnerAnswer).body
        except BaseException:
            self._sock.close()
            raise
        return answer, self._sock

    def arrival(self, window: str) -> Arrival:
        """Which leaves the peer holds, and how many pulls wait for its link."""
        send_frame(self._sock, GetArrival(window=window))
        return expect(self._sock, Arrival)

    def ask_arrival(self, window: str) -> None:
        """Asks as :meth:`arrival` does; :meth:`take_arrival` takes the answer. Nothing else may be asked in between."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()
            send_frame(self._sock, GetArrival(window=window))

    def take_arrival(self) -> Arrival:
        """Takes the answer to :meth:`ask_arrival`."""
        arrival = expect(self._sock, Arrival)
        self.asked_s = None
        return arrival

    def fileno(self) -> int:
        return self._sock.fileno()

    def open_windows(self, nbytes: int) -> None:
        """Opens TCP's windows ahead of the first transfer, by ``nbytes`` of no meaning."""
        send_frame(self._sock, Warm(nbytes=nbytes))
        recv_exactly(self._sock, expect(self._sock, Data).nbytes)

    def request(self, get: Get) -> None:
        """Sends the request for a transfer; :meth:`receive` takes it."""
        send_frame(self._sock, get)

    def receive(self, pull: PullTerms) -> float:
        """Takes the transfer asked for; seconds from its first byte to its last. Raises :class:`TooLate`,
        :class:`TooSlow` (see :class:`PullTerms`), and ``OSError`` or ``EOFError`` for a dead peer. The connection is of
        no more use after any of these."""
        nbytes = pull.into.nbytes
        data = self._await_data(nbytes, pull.overdue)
        start_s = time.monotonic()
        if data.descriptor:
            self._read_one_sided(pull, data.descriptor, start_s)
        else:
            self._read_stream(pull, data.nbytes, start_s)
        return time.monotonic() - start_s

    def _read_stream(self, pull: PullTerms, announced: int, start_s: float) -> None:
        """Reads the parts, of which ``announced`` bytes are the first."""
        into = pull.into
        done, told, nearly_at = 0, False, into.nbytes - min(NEARLY_BYTES, into.nbytes // 16)
        while done < into.nbytes:
            if not told and done >= nearly_at:
                told = True
                self._done(pull)
            if done == announced:
                self._wake_at(1)
                waits_s = time.monotonic()
                announced += self._await_data(into.nbytes - done, pull.overdue).nbytes
                start_s += time.monotonic() - waits_s
            leaf_end = done + pull.leaf_bytes - (done - pull.to_leaf_end) % pull.leaf_bytes
            stop = min(announced, leaf_end, into.nbytes if told else nearly_at)
            self._wake_at(min(self._worth_waking(done, start_s), stop - done))
            done += (count := self._recv(into[done:stop]))
            pull.on_bytes(count)
            self._check_pace(pull, done, start_s)
        self._wake_at(1)
        if not told:
            self._done(pull)

    def _worth_waking(self, done: int, start_s: float) -> int:
        """How many bytes are worth a wake-up at the pace of the first ``done``."""
        if done == 0:
            return WAKE_BYTES
        pace = done / max(time.monotonic() - start_s, 1e-6)
        return min(max(int(pace * WAKE_S), WAKE_BYTES), MOST_WAKE_BYTES) // WAKE_BYTES * WAKE_BYTES

    def _recv(self, into: memoryview) -> int:
        """At least one byte. Raises ``TimeoutError`` when none came for ``dead_s``, ``EOFError``, ``OSError``."""
        try:
            count = self._sock.recv_into(into)
        except TimeoutError:  # not as many as are worth a wake-up, but perhaps some
            self._wake_at(1)
            if not select.select([self._sock], [], [], 0)[0]:
                raise
            count = self._sock.recv_into(into)
        if count == 0:
            raise EOFError(f"{self.node} closed the connection")
        return count

    def _read_one_sided(self, pull: PullTerms, descriptor: bytes, start_s: float) -> None:
        assert pull.read is not None
        heard_s = time.monotonic()

        def alive() -> None:
            nonlocal heard_s
            if select.select([self._sock], [], [], 0)[0]:
                expect_more(self._sock)
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > (self._sock.gettimeout() or 0):
                raise TimeoutError(f"{self.node} is silent")
            self._check_pace(pull, pull.into.nbytes // 2, start_s)  # how much came only the network knows

        pull.read(descriptor, alive)
        pull.on_bytes(pull.into.nbytes)
        self._done(pull)

    def _done(self, pull: PullTerms) -> None:
        send_frame(self._sock, Done())
        pull.on_nearly()

    def _check_pace(self, pull: PullTerms, done: int, start_s: float) -> None:
        took_s = time.monotonic() - start_s
        if done < pull.into.nbytes and took_s > (1 if done < pull.into.nbytes // 2 else 2) * pull.half_s:
            raise TooSlow(self.node, done, took_s)

    def _wake_at(self, nbytes: int) -> None:
        """The kernel wakes this thread only when so much has come: a slow link would wake it for every packet."""
        if nbytes != self._lowat:
            self._lowat = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _await_data(self, nbytes: int, overdue: Callable[[float], bool]) -> Data:
        """The announcement of the next part of ``nbytes`` that are still to come."""
        asked_s = time.monotonic()
        while True:
            frame = recv_frame(self._sock)
            match frame:
                case Data(nbytes=announced) if 0 < announced <= nbytes or announced == nbytes:
                    return frame
                case Queued():
                    if overdue(time.monotonic() - asked_s):
                        raise TooLate(self.node, "has not let the pull start")
                case Declined(reason=reason):
                    raise PeerError(self.node, f"refused: {reason}")
                case _:
                    raise PeerError(self.node, f"sent {type(frame).__name__} instead of {nbytes} bytes of data")
