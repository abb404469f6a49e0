"""Engines of other machines that run layers: found, and connected, over the machines' weight servers.

::

    agent of the leader                                agent of a machine that has the model
      "how busy is your least busy engine?"   --------->  answered, or declined
      "give it this connection"               --------->  its end goes to that engine, ours to the leader's

The connection is one of :mod:`prism.transfer`: both sides have proven that they know the fleet's secret.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from prism.core.ids import DeviceId
from prism.transfer.errors import PeerError, TransferError
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import TransferServer

log = logging.getLogger(__name__)

TOPIC: Final = "layers"
ASK_S: Final = 5.0
ANSWER_S: Final = 75.0
"""Longer than an order to an engine may take."""
FAILURES: Final = (TransferError, OSError, EOFError, msgspec.MsgspecError)


class LayersWanted(msgspec.Struct, frozen=True):
    """What an engine on ``device`` looks for: one that has all of ``model``."""

    model: str
    device: str


@dataclass(frozen=True, slots=True)
class LayersOffer:
    """What a machine does when it is asked. Both raise :class:`PrismError` when there is no such engine, and are
    called in the agent's loop."""

    requests: Callable[[LayersWanted], int]
    """That the least busy engine runs."""
    take: Callable[[LayersWanted, socket.socket], Awaitable[DeviceId]]
    """Gives the connection to it; where it is."""


class LayersNetwork:
    """Of one machine; ``server`` is its weight server."""

    def __init__(self, server: TransferServer) -> None:
        self._server = server

    def offer(self, offer: LayersOffer) -> None:
        """Answers other machines from now on. Called in the loop that is to carry it out."""
        loop = asyncio.get_running_loop()

        async def count(wanted: LayersWanted) -> int:
            return offer.requests(wanted)

        def answer(body: bytes) -> bytes:
            wanted = _decoded(body)
            return msgspec.msgpack.encode(asyncio.run_coroutine_threadsafe(count(wanted), loop).result(ASK_S))

        def take(body: bytes, sock: socket.socket) -> bytes:
            taken: Awaitable[DeviceId] = offer.take(_decoded(body), sock)
            return asyncio.run_coroutine_threadsafe(_waited(taken), loop).result(ANSWER_S).encode()

        self._server.answer(TOPIC, answer, take)

    def least_busy(self, addresses: Mapping[str, str], wanted: LayersWanted) -> tuple[str, str] | None:
        """Name and address of the machine whose engine has the least to do, of ``addresses``; None: there is none.
        Blocks."""
        found: list[tuple[int, str, str]] = []
        for node, address in addresses.items():
            try:
                peer = self._connection(node, address)
                try:
                    raw = peer.ask(TOPIC, msgspec.msgpack.encode(wanted), ASK_S)
                finally:
                    peer.close()
                found.append((msgspec.msgpack.decode(raw, type=int), node, address))
            except FAILURES as error:
                log.info("%s runs no layers of %s for %s: %s", node, wanted.model, wanted.device, error)
        return min(found)[1:] if found else None

    def connect(self, node: str, address: str, wanted: LayersWanted) -> tuple[DeviceId, socket.socket]:
        """A connection to an engine of the machine, and its device; the caller closes it. Blocks. Raises one of
        :data:`FAILURES`."""
        answer, sock = self._connection(node, address).hand_over(TOPIC, msgspec.msgpack.encode(wanted), ANSWER_S)
        return DeviceId(answer.decode()), sock

    def _connection(self, node: str, address: str) -> PeerConnection:
        return PeerConnection(node, address, self._server.secret, self._server.node, ASK_S)


async def _waited(taken: Awaitable[DeviceId]) -> DeviceId:
    return await taken


def _decoded(body: bytes) -> LayersWanted:
    try:
        return msgspec.msgpack.decode(body, type=LayersWanted)
    except msgspec.MsgspecError as error:
        raise PeerError("a machine", f"asked for layers in words that are none: {error}") from error
