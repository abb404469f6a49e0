"""What two machines say to each other about windows, and how it is framed on a TCP connection.

A frame is a 4-byte little-endian length and a MessagePack body. One connection carries one question at a time::

    puller                                server
    Greeting --------------------------->             both prove that they know the secret (prism.transfer.auth)
           <------------------------------ Challenge
    Proof ------------------------------>
           <------------------------------ Welcome
    Describe / GetArrival -------------->
           <------------------------------ Described / Arrival
    OwnerQuestion ---------------------->                 a question of the windows' owner
           <------------------------------ Queued         while the answer is made
           <------------------------------ OwnerAnswer
    Handover -------------------------->                  the owner has the connection from then on
           <------------------------------ OwnerAnswer
    Warm ------------------------------>
           <------------------------------ Data, raw bytes
    Get -------------------------------->
           <------------------------------ Queued         every 100 ms while another transfer has the link
           <------------------------------ Data, raw bytes (or, for a one-sided network, Data with a descriptor); again
                                           while the rest arrives at the server, with Queued in between
    Done ------------------------------->             the bytes are here: the server may start its next transfer

Closing the connection withdraws whatever was asked. Nothing is encrypted: the secret keeps strangers out, it does not
hide bytes from the network.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, TypeVar

import msgspec

from prism.transfer.errors import PeerError

PROTOCOL_VERSION: Final = 2
MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")


class Frame(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all frames; the class name is the tag."""


class Greeting(Frame):
    node: str
    nonce: bytes
    version: int = 1
    """Always sent as :data:`PROTOCOL_VERSION`; version 1 left it out."""


class Challenge(Frame):
    nonce: bytes
    proof: bytes


class Proof(Frame):
    proof: bytes


class Welcome(Frame):
    node: str
    networks: tuple[str, ...]
    """Ways to move data that the server offers: ``tcp`` always, perhaps ``nixl``."""


class Describe(Frame):
    window: str


class Described(Frame):
    """``raw`` as in :class:`prism.transfer.windows.Description`; empty: no such window here."""

    raw: bytes


class GetArrival(Frame):
    window: str


class Arrival(Frame):
    """One byte per leaf (1: held), how many transfers wait for this server's link, and to whom they were slow."""

    leaves: bytes
    waiting: int
    slow: tuple[str, ...] = ()


class Get(Frame):
    """Bytes ``offset .. offset + nbytes`` of the window; ``piece`` is their number in the session's cut."""

    session: str
    window: str
    piece: int
    offset: int
    nbytes: int
    node: str
    """Who asks, by the name that the session's plan uses."""
    network: str = "tcp"
    scheduled: bool = True
    """False: the plan does not foresee this transfer (its sender failed, or the node joined later)."""


class Warm(Frame):
    """Answer with as many bytes of no meaning: a connection that has carried some fills its link from the first byte of
    the first transfer on (TCP's windows are open)."""

    nbytes: int


class Queued(Frame):
    """Still here. ``held`` says whether the server has the bytes itself yet."""

    held: bool


class Data(Frame):
    """``nbytes`` raw bytes follow, the next of those asked for; or none, and ``descriptor`` tells a one-sided
    network where to read."""

    nbytes: int
    descriptor: bytes = b""


class Done(Frame):
    """The transfer is complete at the puller."""


class Declined(Frame):
    reason: str


class OwnerQuestion(Frame):
    """A question that the server has an answerer for (:class:`prism.transfer.server.TransferServer`); answered by
    :class:`Queued` while the answer is made, then :class:`OwnerAnswer` or :class:`Declined`."""

    topic: str
    body: bytes


class OwnerAnswer(Frame):
    body: bytes


class Handover(Frame):
    """The server's owner is given this connection; answered by :class:`OwnerAnswer`, the last frame on it, or
    :class:`Declined`."""

    topic: str
    body: bytes


AnyFrame = (
    Greeting
    | Challenge
    | Proof
    | Welcome
    | Describe
    | Described
    | GetArrival
    | Arrival
    | Get
    | Queued
    | Data
    | Done
    | Declined
    | OwnerQuestion
    | OwnerAnswer
    | Handover
    | Warm
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
F = TypeVar("F", bound=Frame)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Writes one frame. Raises ``OSError`` (``TimeoutError`` after the socket's timeout)."""
    body = _encoder.encode(frame)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def recv_frame(sock: socket.socket) -> AnyFrame:
    """Reads one frame. Raises :class:`PeerError` for bytes that are no frame, ``EOFError`` when the peer closed and
    ``OSError`` (``TimeoutError`` after the socket's timeout)."""
    (length,) = _LENGTH.unpack(recv_exactly(sock, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise PeerError(_name(sock), f"announces a frame of {length} bytes")
    try:
        return _decoder.decode(recv_exactly(sock, length))
    except msgspec.MsgspecError as error:
        raise PeerError(_name(sock), f"sent what is no frame: {error}") from error


def expect(sock: socket.socket, kind: type[F]) -> F:
    """The next frame, which must be a ``kind``. Raises :class:`PeerError` also for a refusal."""
    frame = recv_frame(sock)
    while isinstance(frame, Queued):  # left over from a transfer that ended meanwhile
        frame = recv_frame(sock)
    if isinstance(frame, Declined):
        raise PeerError(_name(sock), f"refused: {frame.reason}")
    if not isinstance(frame, kind):
        raise PeerError(_name(sock), f"sent {type(frame).__name__}, expected {kind.__name__}")
    return frame


def expect_more(sock: socket.socket) -> None:
    """Reads the frame that is there, which may only say that the peer is alive."""
    frame = recv_frame(sock)
    if not isinstance(frame, Queued):
        raise PeerError(_name(sock), f"sent {type(frame).__name__} in the middle of a transfer")


def recv_exactly(sock: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    recv_into(sock, memoryview(buffer))
    return bytes(buffer)


def recv_into(sock: socket.socket, view: memoryview) -> None:
    """Fills ``view``. Raises ``EOFError`` when the peer closed before it was full."""
    got = 0
    while got < view.nbytes:
        count = sock.recv_into(view[got:])
        if count == 0:
            raise EOFError(f"{_name(sock)} closed the connection")
        got += count


def _name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):  # closed, or a socket without such names
        return "peer"
    return f"{host}:{port}"
