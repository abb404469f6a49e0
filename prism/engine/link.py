"""The pool's end of one worker's control channel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from prism.core.ids import DeviceId
from prism.engine.commands import Command, Crashed, Parked, Report, encode, report_decoder
from prism.engine.frames import BadFrame, pack, read_frame

_EXIT_REPORT_S: Final = 10.0
"""The zygote's word on how a worker ended comes at most so much later than the end of its channel, which a process
closes before it is gone. Without a zygote nobody will say it (:meth:`WorkerLink.unwitnessed`)."""
_GONE_S: Final = 30.0
"""A killed process is gone in milliseconds, on a machine that has no time for it in seconds."""
_OWN_SIGNALS: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""What a process gets for what it did itself. SIGKILL is not among them: operators and the kernel, short of memory,
send it to whom they choose."""


class WorkerOwner(Protocol):
    """Who has a worker: the parked ones' keeper, an activation, or an active engine."""

    def on_report(self, link: WorkerLink, report: Report) -> None:
        """The worker says something."""

    def on_gone(self, link: WorkerLink) -> None:
        """The worker is gone; nothing more is reported of it."""


class WorkerLink:
    """One worker process. It is gone when :attr:`gone` is set; :attr:`status` then says how it ended, once known.

    It belongs to one owner at a time, who hears its reports and its end (:meth:`hand_to`).
    """

    def __init__(
        self,
        worker: str,
        device: DeviceId,
        world: int,
        owner: WorkerOwner,
        shape: str = "",
        on_last_words: Callable[[WorkerLink, Crashed], None] = lambda link, words: None,
    ) -> None:
        """``shape``: of the process groups it makes with ``world - 1`` others (:func:`group_shape`). ``on_last_words``
        is called when it says why it ends."""
        self.worker, self.device, self.world, self._owner, self.shape = worker, device, world, owner, shape
        self._on_last_words = on_last_words
        self.pid = 0
        self._doomed = False
        self.kept: tuple[str, ...] = ()
        """Builds of models it had before (:func:`build_name`)."""
        self.parked: asyncio.Future[Parked] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.status: int | None = None
        self._exited = asyncio.Event()
        self.last_words: Crashed | None = None
        self._writer: asyncio.StreamWriter | None = None

    def hand_to(self, owner: WorkerOwner) -> None:
        """``owner`` hears of it from now on; at once when it is gone already."""
        self._owner = owner
        if self.gone.is_set():
            owner.on_gone(self)

    def send(self, command: Command) -> None:
        """Queue ``command``; silently nothing when the worker is gone (its owner hears of its end)."""
        if self._writer is not None and not self.gone.is_set():
            self._writer.write(pack(encode(command)))

    async def attach(self, hello: Parked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The worker has connected: read its reports until it is gone."""
        self._writer = writer
        self.began(hello.pid)
        if not self.parked.done():
            self.parked.set_result(hello)
        with contextlib.suppress(BadFrame, msgspec.MsgspecError):
            while (frame := await read_frame(reader)) is not None:
                report = report_decoder.decode(frame)
                if isinstance(report, Crashed):
                    self.note_last_words(report)
                else:
                    self._owner.on_report(self, report)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_REPORT_S):
                await self._exited.wait()
        self.lost()

    def note_last_words(self, words: Crashed) -> None:
        self.last_words = words
        self._on_last_words(self, words)

    def exited(self, status: int) -> None:
        """The zygote reports the process's end."""
        self.status = status
        self._exited.set()
        if self._writer is None:
            self.lost()

    def unwitnessed(self) -> None:
        """The zygote that would report the process's end is gone itself."""
        self._exited.set()

    def lost(self) -> None:
        """The worker is gone: its channel is closed, or it ended before it opened one."""
        if self.gone.is_set():
            return
        self.gone.set()
        if not self.parked.done():
            self.parked.cancel()
        if self._writer is not None:
            self._writer.close()
        self._owner.on_gone(self)

    def began(self, pid: int) -> None:
        """The process is known now, and ended if it should not be there any more."""
        self.pid = pid
        if self._doomed:
            self.kill()

    def kill(self) -> None:
        """End the process now, or as soon as it is known."""
        self._doomed = True
        if self.pid and not self.gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    @property
    def crashed(self) -> bool:
        """Whether the process ended by its own doing and without a word: a signal of its own, or an exit."""
        return self.status is not None and (self.status > 0 or -self.status in _OWN_SIGNALS)

    def describe_end(self) -> str:
        """How the process ended, for people."""
        if self.last_words is not None:
            return f"worker {self.worker} (pid {self.pid}) failed: {self.last_words.reason}"
        if self.status is None:
            return f"worker {self.worker} (pid {self.pid}) ended"
        if self.status < 0:
            return f"worker {self.worker} (pid {self.pid}) was ended by {signal.Signals(-self.status).name}"
        return f"worker {self.worker} (pid {self.pid}) ended with status {self.status}"


async def until_gone(links: Iterable[WorkerLink], timeout_s: float = _GONE_S) -> None:
    """Kill what is left of ``links`` and wait until they are gone, so that their memory is free."""
    for link in links:
        link.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for link in links:
                await link.gone.wait()
