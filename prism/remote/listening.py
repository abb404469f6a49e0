"""Sockets of an engine's at paths of its machine."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def listen_at(path: Path) -> socket.socket:
    """A socket that listens at ``path``, in the place of what stood there; nobody but this user may connect, and taking
    a connection never waits. Raises ``OSError``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(16)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
