"""The asyncio end of the zygote's socket, for the engine pool and the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from prism.engine.errors import EngineSetupError
from prism.engine.frames import pack, read_frame
from prism.engine.zygote_messages import (
    Another,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Promote,
    ZygoteHello,
    encode,
    from_zygote,
)

PROMOTE_S: Final = 2.0
"""A standby that says nothing for so long is stopped or broken."""


async def promote(standby: Path, zygote: Path) -> int | None:
    """Make the standby at one socket the zygote at the other, whose process is dead. Returns its pid; None when no
    standby lives (one that does not answer is killed)."""
    try:
        reader, writer = await asyncio.open_unix_connection(standby)
    except OSError:
        return None
    pid = _listener_pid(writer)
    try:
        async with asyncio.timeout(PROMOTE_S):
            if await read_frame(reader) is None:
                return None
            standby.rename(zygote)  # noqa: ASYNC240  (one entry of a directory)
            writer.write(pack(encode(Promote())))
            await writer.drain()
            return pid
    except (OSError, TimeoutError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return None
    finally:
        writer.close()


async def another(warm: Path, arguments: Sequence[str], log_file: Path) -> int:
    """Have the zygote at ``warm``, which is not this process's own, fork another one with these ``arguments`` of its
    command line, in this process's environment. Returns its pid. Raises :class:`EngineSetupError`."""
    request = Another(
        ask=0,
        arguments=list(arguments),
        environment=dict(os.environ),
        beside_pid=os.getpid(),
        log_file=str(log_file),
    )
    try:
        reader, writer = await asyncio.open_unix_connection(warm)
    except OSError as error:
        raise EngineSetupError(f"no zygote at {warm}: {error.strerror}") from None
    try:
        await read_frame(reader)  # its hello
        writer.write(pack(encode(request)))
        answer = await read_frame(reader)
    finally:
        writer.close()
    match None if answer is None else from_zygote.decode(answer):
        case Forked(pid=pid):
            return pid
        case ForkFailed(error=reason):
            raise EngineSetupError(f"the zygote at {warm} could not fork: {reason}")
        case _:
            raise EngineSetupError(f"the zygote at {warm} is gone")


def _listener_pid(writer: asyncio.StreamWriter) -> int:
    """The process that listens at the other end."""
    sock: socket.socket = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


class ZygoteClient:
    """Asks a zygote for children and hears when they end.

    ``on_exit(pid, status)`` is called in the loop for each child of this client that ended (status: exit code, or minus
    the signal), ``on_gone()`` when no more of them will be reported. After the zygote is gone :attr:`alive` is False
    and :meth:`fork` raises.
    """

    def __init__(
        self,
        path: Path,
        on_exit: Callable[[int, int], None] = lambda pid, status: None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._on_exit, self._on_gone = path, on_exit, on_gone
        self._asks: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.hello: ZygoteHello | None = None
        self.alive = False

    async def connect(self, timeout_s: float = 120.0) -> ZygoteHello:
        """Connect and wait until the zygote is warm. Raises :class:`EngineSetupError` after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                reader = await self._open()
                frame = await read_frame(reader)
        except (TimeoutError, asyncio.CancelledError) as error:
            await self.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineSetupError(f"the zygote at {self._path} did not answer within {timeout_s:.0f} s") from None
        if frame is None:
            raise EngineSetupError(f"the zygote at {self._path} ended while it started; see its log")
        hello = from_zygote.decode(frame)
        assert isinstance(hello, ZygoteHello)
        self.hello, self.alive = hello, True
        self._task = asyncio.create_task(self._listen(reader))
        return hello

    async def _open(self) -> asyncio.StreamReader:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                return reader
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)

    async def fork(
        self,
        entry: str,
        args: dict[str, Any],
        *,
        watch_pid: int | None = None,
        title: str = "prism: worker",
        log_file: Path | None = None,
        kind: str | None = None,
    ) -> int:
        """Fork a child that calls ``entry`` (``package.module:function``) with the plain dict ``args`` and ends with
        process ``watch_pid`` (default: this one); ``kind`` as in :class:`Fork`. Returns its pid. Raises
        :class:`EngineSetupError`."""
        if not self.alive or self._writer is None:
            raise EngineSetupError(f"the zygote at {self._path} is gone")
        ask = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asks[ask] = answer
        request = Fork(
            ask=ask,
            entry=entry,
            args=args,
            watch_pid=os.getpid() if watch_pid is None else watch_pid,
            title=title,
            log_file=None if log_file is None else str(log_file),
            kind=kind,
        )
        self._writer.write(pack(encode(request)))
        return await answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read_frame(reader)) is not None:
            match from_zygote.decode(frame):
                case Forked(ask=ask, pid=pid):
                    if not (answer := self._asks.pop(ask)).done():  # who asked may have been cancelled
                        answer.set_result(pid)
                case ForkFailed(ask=ask, error=error):
                    if not (answer := self._asks.pop(ask)).done():
                        answer.set_exception(EngineSetupError(f"the zygote could not fork: {error}"))
                case Exited(pid=pid, status=status):
                    self._on_exit(pid, status)
                case ZygoteHello():
                    pass  # only once, before this loop
        self.alive = False
        for answer in [asked for asked in self._asks.values() if not asked.done()]:
            answer.set_exception(EngineSetupError(f"the zygote at {self._path} is gone"))
        self._asks.clear()
        self._on_gone()

    async def close(self) -> None:
        """Leave the zygote; it and the children go on."""
        self.alive = False
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        if self._task is not None:
            await self._task
