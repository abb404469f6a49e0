"""Connections between engines of two machines. Their agents make and prove them; each engine is handed its end.

::

    agent A  --TCP, proven (prism.transfer.auth)--  agent B
       | descriptor, token                              | descriptor
    leader: a stop of its route is "handed:TOKEN"     peer: as if a leader of its machine had connected

A descriptor goes over a Unix socket of the engine's, beside the one at which it listens for leaders, so that engines
have neither ports nor secrets of their own.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

PREFIX: Final = "handed:"
"""Of a stop's path: what follows is the token of a connection that was handed over."""
TAKEN_S: Final = 30.0
"""An engine that has not taken a connection by then is not between two steps any more."""
_MOST_BYTES: Final = 512
_SILENT_S: Final = 3
"""A cut between two machines says nothing: what was sent is acknowledged by then, or the other side is gone."""


def hand_path(path: Path) -> Path:
    """Where the engine that serves layers at ``path`` takes connections that :func:`hand_over` brings."""
    return path.with_name(f"{path.name}.hand")


def hand_over(path: Path, sock: socket.socket, label: str, token: str = "") -> None:
    """Give ``sock`` to the engine that serves layers at ``path``; the caller closes its own. ``label`` names the other
    end for operators; with a ``token`` it is a peer's that a route may lead to, without it is a leader's. Waits
    :data:`TAKEN_S` at most. Raises ``OSError``."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(TAKEN_S)
        channel.connect(str(hand_path(path)))
        socket.send_fds(channel, [f"{token}\n{label}".encode()], [sock.fileno()])
        if not channel.recv(1):
            raise ConnectionError(f"the engine at {path} did not take it")


def take_handed(channel: socket.socket) -> tuple[socket.socket, str, str]:
    """The connection that comes over ``channel``, its label and its token; closes ``channel``. Raises ``OSError`` and
    ``ValueError`` when none comes at once."""
    with channel:
        channel.settimeout(1.0)
        data, fds, _, _ = socket.recv_fds(channel, _MOST_BYTES, 1)
        if not fds:
            raise ValueError("no connection was handed over")
        sock = socket.socket(fileno=fds[0])
        try:
            token, _, label = data.decode().partition("\n")
            channel.sendall(b"k")
        except (OSError, ValueError):
            sock.close()
            raise
    return sock, label, token
