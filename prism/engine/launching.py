"""Starting worker processes: forked, greeted when they connect, waited for until they are parked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from prism.core.ids import local_name
from prism.core.specs import DeviceSpec
from prism.engine.commands import Crashed, Parked, Report, report_decoder
from prism.engine.errors import EngineSetupError
from prism.engine.frames import read_frame
from prism.engine.leftovers import Leftovers, log_file
from prism.engine.link import WorkerLink, WorkerOwner
from prism.engine.options import PoolOptions
from prism.engine.zygote_line import ZygoteLine

WORKER_ENTRY: Final = "prism.engine.worker:main"


class Launcher:
    """Forks workers for ``owner``. ``links`` are those that live; ``on_last_words`` hears why one ends, if it says."""

    def __init__(
        self,
        options: PoolOptions,
        kind: str,
        owner: WorkerOwner,
        on_last_words: Callable[[WorkerLink, Crashed], None],
    ) -> None:
        self._options, self._owner, self._on_last_words = options, owner, on_last_words
        self.links: dict[str, WorkerLink] = {}
        self._numbers = itertools.count(1)
        self._tag = f"{os.getpid():x}"
        self._leftovers = Leftovers(options.run_dir, options.log_dir)
        self._server: asyncio.Server | None = None
        own_path = options.run_dir / f"zygote-{self._tag}.sock"
        self._zygote = ZygoteLine(options.zygote_socket, own_path, kind, self._on_exit, self._on_zygote_gone)

    async def start(self) -> None:
        """Listen for workers and reach (or start) the zygote. Raises :class:`EngineSetupError`."""
        self._leftovers.begin()
        channel = self._channel_path()
        channel.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._greet, channel)
        await self._zygote.connect()

    async def close(self) -> None:
        """Leave the zygote, or end it if it is ours. All workers are gone."""
        await self._zygote.close()
        if self._server is not None:
            self._server.close()
        self._channel_path().unlink(missing_ok=True)

    async def fork(self, device: DeviceSpec, world: int, shape: str = "") -> WorkerLink:
        """A new worker of ``device``, one of ``world`` ranks; it is not ready yet. Raises :class:`EngineSetupError`."""
        name = f"w{self._tag}-{next(self._numbers)}"
        link = WorkerLink(name, device.id, world, self._owner, shape, self._on_last_words)
        self.links[name] = link
        output = None if self._options.log_dir is None else log_file(self._options.log_dir, name)
        title = f"prism: engine {name} {local_name(device.id)}"
        try:
            arguments = self._worker_args(name, device, world)
            link.began(await self._zygote.fork(WORKER_ENTRY, arguments, title=title, log_file=output))
        except EngineSetupError:
            del self.links[name]
            raise
        return link

    async def until_parked(self, link: WorkerLink) -> None:
        """Returns when it is ready for a model. Raises :class:`EngineSetupError`."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await link.parked
        except asyncio.CancelledError:
            if link.gone.is_set():
                raise EngineSetupError(f"{link.describe_end()} before it was ready; see its log") from None
            raise
        except TimeoutError:
            link.kill()
            raise EngineSetupError(
                f"worker {link.worker} was not ready after {self._options.start_timeout_s:.0f} s"
            ) from None

    def forget(self, link: WorkerLink) -> None:
        """``link`` is gone."""
        if self.links.pop(link.worker, None) is not None:
            self._leftovers.ended(link.worker)

    def _channel_path(self) -> Path:
        return self._options.run_dir / f"engines-{self._tag}.sock"

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = await read_frame(reader)
        hello: Report | None = None
        with contextlib.suppress(msgspec.MsgspecError):
            hello = None if frame is None else report_decoder.decode(frame)
        link = self.links.get(hello.worker) if isinstance(hello, Parked | Crashed) else None
        if link is not None and isinstance(hello, Parked):
            await link.attach(hello, reader, writer)
            return
        if link is not None and isinstance(hello, Crashed):
            link.note_last_words(hello)
        writer.close()

    def _on_exit(self, pid: int, status: int) -> None:
        for link in list(self.links.values()):
            if link.pid == pid:
                link.exited(status)

    def _on_zygote_gone(self) -> None:
        for link in self.links.values():
            link.unwitnessed()

    def _worker_args(self, name: str, device: DeviceSpec, world: int) -> dict[str, Any]:
        """See :class:`prism.engine.worker.WorkerArgs`."""
        return {
            "worker": name,
            "channel": str(self._channel_path()),
            "device": local_name(device.id),
            "pace": None if device.pace is None else asdict(device.pace),
            "capacity_bytes": device.memory_bytes,
            "account_dir": str(self._options.account_dir),
            "store_dir": None if self._options.store_dir is None else str(self._options.store_dir),
            "run_dir": str(self._options.run_dir.resolve()),
            "world": world,
            "threads": self._options.threads,
            "parked_bytes": self._options.parked_bytes,
            "active_bytes": self._options.active_bytes,
            "kept_models": self._options.kept_models,
            "load_helpers": self._options.load_helpers,
            "log_dir": None if self._options.log_dir is None else str(self._options.log_dir),
            "secret_file": None if self._options.secret_file is None else str(self._options.secret_file),
        }
