"""From the engine to the front doors: tokens pushed straight into mailboxes, without ever waiting for one."""

from __future__ import annotations

import time
from typing import Final

import zmq

from prism.core.errors import InvalidValue
from prism.wire.curve import secure
from prism.wire.messages import TokenItem, Tokens, encode
from prism.wire.secret import MailKeys

HIGH_WATER_MESSAGES: Final = 20_000
"""Messages kept for a front door that does not read; behind that its requests are stopped here."""
_IDLE_CLOSE_S: Final = 300.0


class Delivery:
    """One PUSH socket per front door, opened at its first request and closed when unused for a while.

    Made after the fork: a ZeroMQ context has threads. ``keys`` are needed for front doors on other machines.
    """

    def __init__(self, keys: MailKeys | None = None) -> None:
        self._keys = keys
        self._context = zmq.Context(1)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._used_s: dict[str, float] = {}

    def send(self, front: str, engine: str, items: list[TokenItem]) -> bytes | None:
        """Queue ``items`` for ``front``. Returns the message's bytes, or None when its queue is full or its address is
        of no use; then nothing of it was sent."""
        data = encode(Tokens(engine=engine, items=items))
        try:
            self._socket(front).send(data, zmq.NOBLOCK)
        except (zmq.ZMQError, InvalidValue):
            return None
        return data

    def _socket(self, front: str) -> zmq.Socket[bytes]:
        now_s = time.monotonic()
        self._used_s[front] = now_s
        found = self._sockets.get(front)
        if found is None:
            self._close_unused(now_s)
            found = self._context.socket(zmq.PUSH)
            found.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
            found.setsockopt(zmq.LINGER, 0)
            secure(found, front, self._keys)
            found.connect(front)
            self._sockets[front] = found
        return found

    def _close_unused(self, now_s: float) -> None:
        for front in [f for f, used_s in self._used_s.items() if now_s - used_s > _IDLE_CLOSE_S and f in self._sockets]:
            self._sockets.pop(front).close(0)
            del self._used_s[front]
