"""Engines of other machines that run layers: found, and connected, over the machines' weight servers.

::

    agent of the leader                                agent of a machine with an instance of the model
      "which pieces have yours, how busy are they?"  -->  answered
      "give that one this connection"                -->  its end goes to that engine, ours to the leader's

The connection is one of :mod:`prism.transfer`: both sides have proven that they know the fleet's secret.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.node.threads import in_own_thread
from prism.transfer.errors import PeerError, TransferError
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import TransferServer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

TOPIC: Final = "layers.held"
ASK_S: Final = 5.0
ANSWER_S: Final = 75.0
"""Longer than an order to an engine may take."""
SILENT_S: Final = 5.0
"""A machine that did not answer is not asked again for so long: whoever looks for a peer waits for all answers."""
FAILURES: Final = (TransferError, OSError, EOFError, msgspec.MsgspecError)
HELD_BACK_S: Final = 1.0
"""An answer that is known already is held back so long at most, until there is another one."""
_PAUSE_S: Final = 0.05
"""Between two questions to a machine that did not hold its answer back: it has failed, or changes all the time."""
_AT_ONCE: Final = 16
_KEPT: Final = 16
"""Connections for further questions."""


class LayersWanted(msgspec.Struct, frozen=True):
    """What an engine on ``device`` looks for: pieces of ``model``; a connection to the instance ``key``. ``known``:
    who has which pieces, as it was told last (:func:`pieces_known`): it is to be told when that has changed."""

    model: str
    device: str
    key: InstanceKey | None = None
    known: str = ""


class HeldPieces(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that runs, or could run, layers for others."""

    key: InstanceKey
    device: str
    pieces: list[int]
    """That it has."""
    led_pieces: int
    """That it runs for others now, counted once for each of these."""
    requests: int


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """Such an instance, and where its machine's weight server is."""

    node: str
    address: str
    held: HeldPieces


Holders = list[HeldElsewhere]


@dataclass(frozen=True, slots=True)
class LayersOffer:
    """What a machine does when it is asked; called in the agent's loop."""

    held: Callable[[LayersWanted], list[HeldPieces]]
    changed: Callable[[float], Awaitable[None]]
    """Returns when what any instance has may have changed, or after so many seconds."""
    take: Callable[[LayersWanted, socket.socket], Coroutine[Any, Any, DeviceId]]
    """Gives the connection to the engine; where it is. Raises :class:`PrismError` when it cannot be."""


class LayersNetwork:
    """Of one machine; ``server`` is its weight server."""

    def __init__(self, server: TransferServer) -> None:
        self._server = server
        self._silent_until_s: dict[str, float] = {}
        """By machine."""
        self._kept: dict[str, PeerConnection] = {}
        """By address, while nobody asks over it."""
        self._closed = False

    def offer(self, offer: LayersOffer) -> None:
        """Answers other machines from now on. Called in the loop that is to carry it out."""
        loop = asyncio.get_running_loop()

        async def held(wanted: LayersWanted) -> list[HeldPieces]:
            give_up_s = time.monotonic() + HELD_BACK_S
            while pieces_known(found := offer.held(wanted)) == wanted.known:
                if (left_s := give_up_s - time.monotonic()) <= 0:
                    break
                await offer.changed(left_s)
            return found

        def answer(body: bytes) -> bytes:
            return msgspec.msgpack.encode(self._in_loop(loop, held(_decoded(body)), ASK_S))

        def take(body: bytes, sock: socket.socket) -> bytes:
            return self._in_loop(loop, offer.take(_decoded(body), sock), ANSWER_S).encode()

        self._server.answer(TOPIC, answer, take)

    def _in_loop(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T], limit_s: float) -> _T:
        """What ``work`` returns. Raises :class:`PeerError` when it takes too long, and when the loop ends, which may
        neither begin it nor say so."""
        try:
            return asyncio.run_coroutine_threadsafe(work, loop).result(limit_s)
        except (CancelledError, RuntimeError, TimeoutError) as error:  # asyncio's own words for a loop that ends, too
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise PeerError(self._server.node, "it has no time, or stops") from error

    def holders(self, addresses: Mapping[str, str], wanted: LayersWanted) -> list[HeldElsewhere]:
        """Instances of the model on the machines ``addresses``, which are asked all at once; one that does not answer
        has none. Blocks."""
        now_s = time.monotonic()
        asked = [(node, at) for node, at in addresses.items() if now_s >= self._silent_until_s.get(node, 0.0)]
        if not asked:
            return []
        with ThreadPoolExecutor(min(len(asked), _AT_ONCE)) as pool:
            answers = pool.map(lambda there: self._ask(there[0], there[1], wanted), asked)
        return [found for several in answers for found in several]

    async def watch(self, node: str, address: str, wanted: LayersWanted, tell: Callable[[Holders], None]) -> None:
        """Tells who on the machine has which pieces, and again whenever that has changed, until cancelled: whoever
        waits for the last layer that its pipeline lacks hears of it as soon as it is there, without asking again and
        again."""
        known: str | None = None
        while True:
            began_s = time.monotonic()
            found = await in_own_thread(
                self.holders, {node: address}, msgspec.structs.replace(wanted, known=known or "")
            )
            now_known = pieces_known([one.held for one in found])
            if now_known != known:
                known = now_known
                tell(found)
            elif time.monotonic() - began_s < HELD_BACK_S / 2:
                await asyncio.sleep(_PAUSE_S)

    def _ask(self, node: str, address: str, wanted: LayersWanted) -> list[HeldElsewhere]:
        try:
            raw = self._answer(node, address, msgspec.msgpack.encode(wanted))
            held = msgspec.msgpack.decode(raw, type=list[HeldPieces])
        except FAILURES as error:
            log.info("%s runs no layers of %s for %s: %s", node, wanted.model, wanted.device, error)
            if isinstance(error, TimeoutError):
                self._silent_until_s[node] = time.monotonic() + SILENT_S
            return []
        return [HeldElsewhere(node, address, one) for one in held]

    def _answer(self, node: str, address: str, body: bytes) -> bytes:
        """Over the connection of the last question, if it is there still: whoever waits for its pipeline asks again and
        again, beside the weights that come."""
        if (kept := self._kept.pop(address, None)) is not None:
            try:
                return self._asked(address, kept, body)
            except TimeoutError:
                raise
            except (OSError, EOFError):
                log.debug("%s has closed a connection", node)
        return self._asked(address, self._connection(node, address), body)

    def _asked(self, address: str, peer: PeerConnection, body: bytes) -> bytes:
        try:
            answer = peer.ask(TOPIC, body, ASK_S)
        except BaseException:
            peer.close()
            raise
        if self._closed or len(self._kept) >= _KEPT or self._kept.setdefault(address, peer) is not peer:
            peer.close()
        return answer

    def close(self) -> None:
        """Ends what is kept open; what is asked for still ends with its answer."""
        self._closed = True
        while self._kept:
            self._kept.popitem()[1].close()

    def connect(self, there: HeldElsewhere, wanted: LayersWanted) -> tuple[DeviceId, socket.socket]:
        """A connection to the engine of the instance, and its device; the caller closes it. Blocks. Raises one of
        :data:`FAILURES`."""
        asked = msgspec.structs.replace(wanted, key=there.held.key)
        peer = self._connection(there.node, there.address)
        answer, sock = peer.hand_over(TOPIC, msgspec.msgpack.encode(asked), ANSWER_S)
        return DeviceId(answer.decode()), sock

    def _connection(self, node: str, address: str) -> PeerConnection:
        return PeerConnection(node, address, self._server.secret, self._server.node, ASK_S)


def pieces_known(held: Sequence[HeldPieces]) -> str:
    """Who has which pieces, in short."""
    return ";".join(f"{one.key} {','.join(map(str, one.pieces))}" for one in held) or "-"


def _decoded(body: bytes) -> LayersWanted:
    try:
        return msgspec.msgpack.decode(body, type=LayersWanted)
    except msgspec.MsgspecError as error:
        raise PeerError("a machine", f"asked for layers in words that are none: {error}") from error
