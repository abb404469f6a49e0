"""Authentication of mailboxes between machines: ZeroMQ's CURVE with the fleet's keys, and heartbeats."""

from __future__ import annotations

from typing import Final

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from prism.core.errors import InvalidValue
from prism.wire.secret import MailKeys

HEARTBEAT_MS: Final = 1_000
SILENT_MS: Final = 3_000
"""A TCP connection whose other end does not answer heartbeats for so long is broken. They are answered by ZeroMQ's own
thread, so that a process that is starved or busy is not taken for a dead one."""


class SenderCheck:
    """Lets senders in that hold the fleet's sender key."""

    def __init__(self, keys: MailKeys) -> None:
        self._keys, self.refused = keys, 0

    def callback(self, domain: str, key: bytes) -> bool:
        good = key == self._keys.sender_public
        self.refused += not good
        return good


def secure(socket: zmq.Socket[bytes], address: str, keys: MailKeys | None) -> None:
    """Makes a sender's ``socket`` fit for ``address`` before it connects. Raises :class:`InvalidValue` for TCP without
    keys."""
    check_keys(address, keys)
    if keys is None or not address.startswith("tcp://"):
        return
    socket.curve_serverkey = keys.inbox_public
    socket.curve_publickey, socket.curve_secretkey = keys.sender_public, keys.sender_secret
    heartbeat(socket)


def check_keys(address: str, keys: MailKeys | None) -> None:
    if keys is None and address.startswith("tcp://"):
        raise InvalidValue("mailbox", address, "needs the fleet's secret: mailboxes between machines are authenticated")


def heartbeat(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENT_MS)


def guard(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: MailKeys) -> ThreadAuthenticator:
    """Makes an inbox's ``socket`` admit the fleet's senders only, before it binds. Stop what is returned after the
    socket is closed."""
    authenticator = ThreadAuthenticator(zmq.Context.shadow(context.underlying))
    authenticator.start()
    authenticator.configure_curve_callback("*", SenderCheck(keys))
    socket.curve_server = True
    socket.curve_secretkey = keys.inbox_secret
    heartbeat(socket)
    return authenticator
