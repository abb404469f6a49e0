"""The pulling side of a connection to another machine."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prism.transfer.auth import prove_to_server
from prism.transfer.frames import (
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
    expect_more,
    recv_exactly,
    recv_frame,
    send_frame,
)
from prism.weights.errors import BadPack, PeerError
from prism.weights.packs.format import PREFIX, PackHeader, PackKey, decode_header, decode_prefix

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
class Pull:
    """One transfer at the puller."""

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
    nearly: Callable[[], None]
    """Called once, when little or nothing is left."""
    got: Callable[[int], None]
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
            self.movers = prove_to_server(self._sock, secret, me).movers
        except BaseException:
            self._sock.close()
            raise

    def close(self) -> None:
        self._sock.close()

    def header(self, key: PackKey) -> PackHeader | None:
        """The pack's header, None if the peer does not have the pack. Raises :class:`BadPack` for a broken one."""
        send_frame(self._sock, GetHeader(key=key))
        header = self._header(expect(self._sock, Header).raw)
        if header is not None and header.key != key:
            raise BadPack(self.node, f"is {header.key}, asked for {key}")
        return header

    def _header(self, raw: bytes) -> PackHeader | None:
        if not raw:
            return None
        header_bytes, checksum = decode_prefix(raw, self.node)
        return decode_header(raw[PREFIX.size : PREFIX.size + header_bytes], checksum, self.node)

    def small_files(self, path: str, mark: str) -> list[tuple[str, bytes]]:
        """See :meth:`prism.weights.exchange.model_folders.Folders.small_files`."""
        send_frame(self._sock, GetFiles(path=path, mark=mark))
        return expect(self._sock, Files).files

    def packed_folder(self, path: str, mark: str, timeout_s: float) -> PackHeader | None:
        """See :meth:`prism.weights.exchange.model_folders.Folders.packed`. Raises :class:`PeerError` after
        ``timeout_s``."""
        send_frame(self._sock, PackFolder(path=path, mark=mark))
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            match recv_frame(self._sock):
                case Queued():
                    continue
                case Header(raw=raw):
                    return self._header(raw)
                case Refused(reason=reason):
                    raise PeerError(self.node, f"refused: {reason}")
                case frame:
                    raise PeerError(self.node, f"sent {type(frame).__name__} instead of a header")
        raise PeerError(self.node, f"has not packed {path} after {timeout_s:.0f} s")

    def arrival(self, key: PackKey) -> Arrival:
        """Which leaves the peer holds, and how many pulls wait for its link."""
        send_frame(self._sock, GetArrival(key=key))
        return expect(self._sock, Arrival)

    def ask_arrival(self, key: PackKey) -> None:
        """Asks as :meth:`arrival` does; :meth:`answered` takes the answer. Nothing else may be asked in between."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()
            send_frame(self._sock, GetArrival(key=key))

    def answered(self) -> Arrival:
        """Takes the answer to :meth:`ask_arrival`."""
        arrival = expect(self._sock, Arrival)
        self.asked_s = None
        return arrival

    def fileno(self) -> int:
        return self._sock.fileno()

    def warm(self, nbytes: int) -> None:
        """Opens TCP's windows ahead of the first transfer."""
        send_frame(self._sock, Warm(nbytes=nbytes))
        recv_exactly(self._sock, expect(self._sock, Data).nbytes)

    def ask(self, get: Get) -> None:
        """Sends the request for a transfer; :meth:`receive` takes it."""
        send_frame(self._sock, get)

    def receive(self, pull: Pull) -> float:
        """Takes the transfer asked for; seconds from its first byte to its last. Raises :class:`TooLate`,
        :class:`TooSlow` (see :class:`Pull`), and ``OSError`` or ``EOFError`` for a dead peer. The connection is of no
        more use after any of these."""
        nbytes = pull.into.nbytes
        data = self._await_data(nbytes, pull.overdue)
        start_s = time.monotonic()
        if data.descriptor:
            self._read_one_sided(pull, data.descriptor, start_s)
        else:
            self._read_stream(pull, data.nbytes, start_s)
        return time.monotonic() - start_s

    def _read_stream(self, pull: Pull, announced: int, start_s: float) -> None:
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
            pull.got(count)
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

    def _read_one_sided(self, pull: Pull, descriptor: bytes, start_s: float) -> None:
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
        pull.got(pull.into.nbytes)
        self._done(pull)

    def _done(self, pull: Pull) -> None:
        send_frame(self._sock, Done())
        pull.nearly()

    def _check_pace(self, pull: Pull, done: int, start_s: float) -> None:
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
                case Refused(reason=reason):
                    raise PeerError(self.node, f"refused: {reason}")
                case _:
                    raise PeerError(self.node, f"sent {type(frame).__name__} instead of {nbytes} bytes of data")
