"""What a load and its helpers say to each other: one MessagePack message per packet of a Unix socket.

::

    load                                        helper
      | -- AskHelp(path of the host copy) ------> |  a ring of staging pages, charged to the helper's device
      | <-- Ring(slots) + a descriptor per slot - |
      | -- StageChunk(slot, leaves) ------------> |  host memory -> slot, over the helper's own link
      | <-- Staged(slot) ------------------------ |
      |    slot -> target, over the link between the two
      | <-- HelpWithdrawn --------------------------- |  at any time: it needs its memory or its link
      | -- end of the socket -------------------> |  nothing of the ring is in use any more: it is given back
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

import msgspec

PACKET_BYTES: Final = 64 << 10
_MOST_SLOTS: Final = 64


class _Packet(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


class AskHelp(_Packet, frozen=True, kw_only=True):
    """The load's first word."""

    path: str
    """The pack's copy in host memory."""
    chunk_bytes: int
    """Most bytes of a chunk."""
    verify: bool
    """Check each leaf once more before it is sent."""


class Ring(_Packet, frozen=True, kw_only=True):
    """The helper's answer, with as many descriptors."""

    slots: list[tuple[int, int]]
    """Offset and length of each slot's page behind its descriptor."""


class StageChunk(_Packet, frozen=True, kw_only=True):
    slot: int
    first_leaf: int
    end_leaf: int


class Staged(_Packet, frozen=True, kw_only=True):
    """The slot has what was asked for; or, not ``good``, a leaf whose checksum is wrong."""

    slot: int
    good: bool = True


class HelpWithdrawn(_Packet, frozen=True, kw_only=True):
    """The helper stages nothing more, and waits for the ring to be let go."""

    why: str


Packet = AskHelp | Ring | StageChunk | Staged | HelpWithdrawn
encode: Final = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def packet_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(sock: socket.socket, packet: Packet, descriptors: Sequence[int] = ()) -> None:
    """Raises ``OSError`` when the other side is gone or takes nothing."""
    if descriptors:
        socket.send_fds(sock, [encode(packet)], list(descriptors))
    else:
        sock.send(encode(packet))


def receive(sock: socket.socket) -> tuple[Packet | None, list[int]]:
    """The next packet and its descriptors, which are the caller's; None: the other side is gone. Raises ``OSError``
    (``TimeoutError`` after the socket's timeout)."""
    data, descriptors, _, _ = socket.recv_fds(sock, PACKET_BYTES, _MOST_SLOTS)
    try:
        return (_decoder.decode(data) if data else None), descriptors
    except msgspec.MsgspecError:
        return None, descriptors  # another version's: of no use
