"""One supervised process: how it is started, noticing its end, starting it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from prism.obs.metrics import forget_process

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0
HEALTHY_AFTER_S: Final = 10.0
"""A process that lived this long starts with a short pause again."""


Starter = Callable[[], Awaitable[int]]
"""Starts a process and returns its pid."""


class Child:
    """A process that should always run. ``start`` begins it and returns its pid; it may be called many times. ``died``
    is called when it ended unasked, before it is started again."""

    def __init__(self, name: str, start: Starter, died: Callable[[], None]) -> None:
        self.name, self.restarts, self.pid = name, -1, 0
        self._start, self._died = start, died
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.started = asyncio.Event()

    def run(self) -> None:
        """Starts it and keeps it running."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after ``timeout_s``. Returns when the process is gone."""
        self._stopping = True
        if self._task is None:
            return
        if self.pid:
            _signal(self.pid, signal.SIGTERM)
            done, _ = await asyncio.wait([self._task], timeout=timeout_s)
            if not done:
                log.warning("%s did not stop within %.0f s, killing it", self.name, timeout_s)
                _signal(self.pid, signal.SIGKILL)
                await asyncio.wait([self._task], timeout=5.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal if it runs."""
        if self.pid:
            _signal(self.pid, number)

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            began_s = time.monotonic()
            try:
                self.pid = await self._start()
            except Exception as error:
                log.error("%s could not be started: %s", self.name, error)
            else:
                self.restarts += 1
                self.started.set()
                await _ended(self.pid)
                forget_process(self.pid)
                self.pid = 0
                if self._stopping:
                    return
                log.error("%s ended; starting it again", self.name, extra={"restarts": self.restarts + 1})
                self._died()
            lived_s = time.monotonic() - began_s
            pause_s = FIRST_PAUSE_S if lived_s > HEALTHY_AFTER_S else min(LONGEST_PAUSE_S, pause_s * 2)
            await asyncio.sleep(pause_s)


def python_module(module: str, arguments: Sequence[str], log_file: Path) -> Starter:
    """Starts ``python -m module arguments`` in its own session, its output appended to ``log_file``."""

    async def start() -> int:
        return _spawn([sys.executable, "-m", module, *arguments], log_file)

    return start


def _spawn(command: list[str], log_file: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_file), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], command, os.environ, file_actions=actions, setsid=True)


async def _ended(pid: int) -> None:
    """Returns when process ``pid`` has ended, whoever its parent is; a child of this process is reaped."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    _reap(pid)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # forked by the zygote, which reaps it
        os.waitpid(pid, os.WNOHANG)
