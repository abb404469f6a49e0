"""One transfer at the machine that is pulled from: waits for its turn, and says all the while that this side lives.

The functions write to one connection and belong to its thread.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Final

from prism.transfer.frames import Data, Done, Get, Queued, expect, send_frame
from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.outgoing import OutgoingSession

PING_S: Final = 0.1
SEND_TIMEOUT_S: Final = 5.0
"""A puller that takes no byte for this long is dropped."""
DRIVE_S: Final = 0.0005
MOST_WARM_BYTES: Final = 4 << 20


def send_in_turn(sock: socket.socket, get: Get, outgoing: OutgoingSession, network: OneSidedNetwork | None) -> None:
    """Waits until ``get`` may start, sends it (``network`` None: over ``sock``) and takes the puller's word that it is
    complete. Raises ``EOFError`` when the puller gave up, ``OSError``."""
    pinged_s = time.monotonic()

    def waiting() -> None:
        nonlocal pinged_s
        now_s = time.monotonic()
        if now_s - pinged_s >= PING_S:
            pinged_s = now_s
            send_frame(sock, Queued(held=outgoing.holds(get)))
        raise_if_closed(sock)

    with outgoing.turn(get, waiting) as completed:
        if network is None:
            _stream(sock, outgoing, get, waiting)
        else:
            _offer(sock, outgoing, get, network, waiting)
        expect(sock, Done)
        completed()


def _stream(sock: socket.socket, outgoing: OutgoingSession, get: Get, waiting: Callable[[], None]) -> None:
    """Sends what is here and the rest as it arrives, each part announced: in between there is room to say that this
    node is alive."""
    at, end = get.offset, get.offset + get.nbytes
    while True:
        there = outgoing.await_bytes(at, end, waiting)
        send_frame(sock, Data(nbytes=there - at))
        outgoing.window.send(sock, at, there)
        at = there
        if at == end:
            return


def _offer(
    sock: socket.socket, outgoing: OutgoingSession, get: Get, network: OneSidedNetwork, waiting: Callable[[], None]
) -> None:
    """Lets the puller read, and keeps the network going until it says something."""
    at, end = get.offset, get.offset + get.nbytes
    while at < end:  # a one-sided read takes no notice of what is not here yet
        at = outgoing.await_bytes(at, end, waiting)
    send_frame(sock, Data(nbytes=get.nbytes, descriptor=outgoing.offer(network, get.offset)))
    pinged_s = time.monotonic()
    while not select.select([sock], [], [], DRIVE_S)[0]:
        network.make_progress()
        if time.monotonic() - pinged_s >= PING_S:
            pinged_s = time.monotonic()
            send_frame(sock, Queued(held=True))


def send_warmth(sock: socket.socket, nbytes: int) -> None:
    """Bytes of no meaning (:class:`~prism.transfer.frames.Warm`), :data:`MOST_WARM_BYTES` at most."""
    nbytes = min(max(nbytes, 0), MOST_WARM_BYTES)
    send_frame(sock, Data(nbytes=nbytes))
    sock.sendall(bytes(nbytes))


def raise_if_closed(sock: socket.socket) -> None:
    """A puller that gave up closes its connection; nothing else is sent while it waits."""
    sock.settimeout(0.0)
    try:
        if not sock.recv(1, socket.MSG_PEEK):
            raise EOFError("the puller gave up")
    except BlockingIOError:
        pass
    finally:
        sock.settimeout(SEND_TIMEOUT_S)
