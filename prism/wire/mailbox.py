"""Mailboxes: a process reads its messages from one :class:`Inbox` and writes to the mailboxes of others through one
:class:`Outbox`.

Addresses are ZeroMQ endpoints (``ipc://PATH`` inside a machine, ``tcp://HOST:PORT`` between machines) and stand in the
store. Whoever may open a socket file may write to it; between machines every connection is encrypted and both ends
prove with the fleet's keys who they are (CURVE): without keys there is no TCP.

Delivery is at most once and in order per sender and receiver: whatever must survive a lost message is asked for again
(:class:`~prism.wire.messages.ResumeQuery`) or lives in a stream of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from prism.core.errors import InvalidValue
from prism.wire.curve import check_keys, guard, secure
from prism.wire.message import Message
from prism.wire.messages import AnyMessage, decode, encode
from prism.wire.secret import MailKeys

log = logging.getLogger(__name__)

HIGH_WATER_MESSAGES: Final = 100_000
"""Messages buffered per peer before a sender is refused; a token message has about 100 bytes."""

_UNIX_PATH_BYTES: Final = 107
_UP: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN: Final = zmq.Event.DISCONNECTED


def check_address(address: str) -> str:
    """``address`` itself. Raises :class:`InvalidValue` when it is no endpoint that a mailbox can have."""
    scheme, _, rest = address.partition("://")
    if scheme not in ("ipc", "tcp") or not rest:
        raise InvalidValue("mailbox", address, "not a mailbox address", ("ipc://PATH", "tcp://HOST:PORT"))
    if scheme == "ipc" and len(rest.encode()) > _UNIX_PATH_BYTES:
        size = len(rest.encode())
        why = f"a unix socket path may have {_UNIX_PATH_BYTES} bytes, this has {size}; use a shorter state directory"
        raise InvalidValue("mailbox", address, why)
    return address


class Inbox:
    """The receiving end, bound to one address.

    ``async for message in inbox`` yields decoded messages until :meth:`close`; malformed ones are counted in
    :attr:`malformed`, logged and dropped, so that no peer can end the loop. One reader only.
    """

    def __init__(
        self, address: str, context: zmq.asyncio.Context | None = None, *, keys: MailKeys | None = None
    ) -> None:
        """Binds at once. ``tcp://HOST:0`` picks a free port; :attr:`address` has the real one. A stale socket file is
        replaced. ``keys`` are what an :class:`Outbox` beside this inbox needs, too. Raises :class:`InvalidValue`."""
        check_keys(check_address(address), keys)
        self.keys = keys
        self.malformed = 0
        self._authenticator: ThreadAuthenticator | None = None
        self._own_context = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True)
        elif keys is not None:
            self._authenticator = guard(self._context, self._socket, keys)
        self._socket.bind(address[: -len(":0")] + ":*" if address.endswith(":0") else address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closed = False

    def __aiter__(self) -> AsyncIterator[AnyMessage]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[AnyMessage]:
        while not self._closed:
            try:
                data = await self._receive()
            except (zmq.ZMQError, asyncio.CancelledError):
                if self._closed:
                    return
                raise
            message = self._decode(data)
            if message is not None:
                yield message

    async def recv(self) -> AnyMessage:
        """The next well-formed message."""
        while True:
            message = self._decode(await self._receive())
            if message is not None:
                return message

    async def _receive(self) -> bytes:
        """The next message's bytes. A sender that goes away can leave the socket readable without anything in it."""
        while True:
            with contextlib.suppress(zmq.Again):
                return await self._socket.recv()

    def pending(self) -> bool:
        """Whether a message is here that nobody has read."""
        return not self._closed and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def drain(self, limit: int = 1000) -> list[AnyMessage]:
        """Up to ``limit`` messages that are already here, without waiting (saves wake-ups on the token path)."""
        found: list[AnyMessage] = []
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        while len(found) < limit:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._decode(data)
            if message is not None:
                found.append(message)
        return found

    def _decode(self, data: bytes) -> AnyMessage | None:
        try:
            return decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.malformed += 1
            log.warning("mailbox %s: dropped a malformed message of %d bytes: %s", self.address, len(data), error)
            return None

    def close(self) -> None:
        """Unbinds; pending messages are dropped. A reader that waits ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._own_context:
            self._context.term()
        if self.address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                Path(self.address.removeprefix("ipc://")).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Outbox:
    """The sending end for any number of addresses. Never blocks; usable from synchronous and asynchronous code of one
    thread.

    Sockets are opened on first use and kept, the least recently used one is closed above ``max_peers``. ZeroMQ
    reconnects by itself; what was queued for a peer that never comes back is dropped with the socket.
    """

    def __init__(
        self,
        *,
        max_peers: int = 256,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keys: MailKeys | None = None,
    ) -> None:
        """``keys`` are needed for addresses on other machines."""
        self._keys = keys
        self._monitors: dict[str, tuple[zmq.Socket[bytes], bool]] = {}
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._peers: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._max_peers = max_peers
        self.refused = 0
        """Messages that could not be queued because the peer's buffer was full."""

    def send(self, address: str, message: Message) -> bool:
        """Queues ``message`` for ``address``. False: the peer's buffer is full (it is dead or stuck) and nothing was
        queued."""
        return self.send_bytes(address, encode(message))

    def send_bytes(self, address: str, data: bytes) -> bool:
        """Like :meth:`send` for a message that is encoded already."""
        try:
            self._peer(address).send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.refused += 1
            return False
        return True

    def forget(self, address: str) -> None:
        """Closes the socket to ``address`` (its owner is gone) and drops what is queued for it."""
        socket = self._peers.pop(address, None)
        if socket is not None:
            self._close(address, socket, 0)

    def broken(self, address: str) -> bool:
        """Whether the connection to ``address`` was up and is not any more: its process ended, or its machine does not
        answer. Known from the first call on, which opens the connection; ask again and again."""
        if address not in self._monitors:
            monitor = self._peer(address).get_monitor_socket(_UP | _DOWN)
            self._monitors[address] = (monitor, False)
        monitor, down = self._monitors[address]
        while monitor.poll(0):
            down = recv_monitor_message(monitor)["event"] == _DOWN
        self._monitors[address] = (monitor, down)
        return down

    def _close(self, address: str, socket: zmq.Socket[bytes], linger_ms: int) -> None:
        if (monitor := self._monitors.pop(address, None)) is not None:
            socket.disable_monitor()
            monitor[0].close(linger=0)
        socket.close(linger=linger_ms)

    def _peer(self, address: str) -> zmq.Socket[bytes]:
        socket = self._peers.get(address)
        if socket is not None:
            self._peers.move_to_end(address)
            return socket
        check_address(address)
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            secure(socket, address, self._keys)
            socket.connect(address)
        except BaseException:
            socket.close(linger=0)
            raise
        self._peers[address] = socket
        if len(self._peers) > self._max_peers:
            self._close(*self._peers.popitem(last=False), 0)
        return socket

    def close(self, linger_s: float = 0.2) -> None:
        """Closes all sockets; messages still queued get ``linger_s`` to leave. Idempotent."""
        while self._peers:
            self._close(*self._peers.popitem(), int(linger_s * 1000))
        if self._own_context:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
