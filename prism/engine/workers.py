"""The worker processes of one machine: the zygote they come from, those that start, and those that are parked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from prism import memory
from prism.core.ids import DeviceId, local_name
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.commands import Parked, Report, report_decoder
from prism.engine.errors import EngineSetupError, NoSeat
from prism.engine.frames import read_frame
from prism.engine.leftovers import Leftovers, log_file
from prism.engine.link import WorkerLink, until_gone
from prism.engine.options import PoolOptions
from prism.engine.outside import has_room_to_park, most_parked
from prism.engine.zygote_client import ZygoteClient

log = logging.getLogger(__name__)

WORKER_ENTRY: Final = "prism.engine.worker:main"
ZYGOTE_S: Final = 300.0
"""A zygote that is not warm after this counts as broken."""


class Workers:
    """Forks, parks and ends workers. ``memory`` has the devices' accounts after :meth:`start`."""

    def __init__(self, devices: Sequence[DeviceSpec], options: PoolOptions) -> None:
        self._options = options
        self.devices = {d.id: d for d in devices}
        self.memory: dict[DeviceId, memory.Device] = {}
        self._leftovers = Leftovers(options.run_dir, options.log_dir)
        self._numbers = itertools.count(1)
        self._tag = f"{os.getpid():x}"
        self._links: dict[str, WorkerLink] = {}
        self._parked: dict[DeviceId, list[WorkerLink]] = {d: [] for d in self.devices}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._zygote = ZygoteClient(Path())
        self._zygote_process: asyncio.subprocess.Process | None = None
        self._closing = False

    async def start(self) -> None:
        """Reach (or start) the zygote and park the first workers. Raises :class:`EngineSetupError`."""
        for directory in (
            self._options.run_dir,
            self._options.account_dir,
            *([self._options.log_dir] if self._options.log_dir else []),
        ):
            directory.mkdir(parents=True, exist_ok=True)
        self._leftovers.begin()
        for device in self.devices.values():
            self.memory[device.id] = memory.open_device(
                local_name(device.id), device.memory_bytes, account_dir=self._options.account_dir
            )
        channel = self._channel_path()
        channel.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._greet, channel)
        await self._connect_zygote()
        links = [
            await self._fork(device, 1)
            for device in self.devices.values()
            for _ in range(self._options.parked_per_device)
            if has_room_to_park(self._options, self.memory[device.id].free_bytes())
        ]
        for link in links:
            await self._until_parked(link)
            self._parked[link.device].append(link)

    async def close(self) -> None:
        """End every worker, and the zygote if it is ours."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await until_gone(list(self._links.values()))
        await self._zygote.close()
        if self._zygote_process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._zygote_process.kill()
            await self._zygote_process.wait()
        if self._server is not None:
            self._server.close()
        self._channel_path().unlink(missing_ok=True)

    async def take(self, device: DeviceId, world: int) -> WorkerLink:
        """A parked worker of ``device``; forks one if none is there or if the model spans several. Raises
        :class:`EngineSetupError`; :class:`NoSeat` when the device has as many workers as it may."""
        if world == 1 and self._parked[device]:
            link = self._parked[device].pop(0)
            self._refill(device)
            return link
        most = self._options.max_per_device
        if self._count(device) >= most and not self._give_up_spare(device):
            raise NoSeat(f"{device} has {most} workers, as many as it may (max_per_device)")
        link = await self._fork(self.devices[device], world)
        await self._until_parked(link)
        return link

    def _count(self, device: DeviceId) -> int:
        return sum(link.device == device for link in self._links.values())

    def _give_up_spare(self, device: DeviceId) -> bool:
        """End a parked worker to make room for one of another kind."""
        if not self._parked[device]:
            return False
        self._parked[device].pop().kill()
        return True

    def release(self, links: Sequence[WorkerLink], reusable: bool) -> None:
        """Workers of an engine that is over: back to the parked ones, or killed."""
        for link in links:
            link.hand_to(self)
            if link.gone.is_set():
                continue
            if reusable and link.world == 1 and not self._closing:
                spare = self._parked[link.device]
                spare.insert(0, link)
                account = self.memory[link.device]
                while len(spare) > most_parked(self._options, account.free_bytes(), account.wanted_bytes()):
                    spare.pop().kill()
            else:
                link.kill()

    def counts(self) -> Mapping[DeviceId, Mapping[str, int]]:
        """See :meth:`prism.engine.api.Engines.counts`."""
        found = {device: {"starting": 0, "parked": len(parked), "active": 0} for device, parked in self._parked.items()}
        for link in self._links.values():
            if not link.parked.done():
                found[link.device]["starting"] += 1
            elif link not in self._parked[link.device]:
                found[link.device]["active"] += 1
        return found

    # --- the zygote ---

    async def _connect_zygote(self) -> None:
        path = self._options.zygote_socket
        if path is None:
            path = self._options.run_dir / f"zygote-{self._tag}.sock"
            kind = next((d.kind.value for d in self.devices.values()), DeviceKind.HOST.value)
            self._zygote_process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "prism.engine.zygote", "--socket", str(path), "--kind", kind),
                *("--parent-pid", str(os.getpid())),
            )
        self._zygote = ZygoteClient(path, self._on_exit, self._on_zygote_gone)
        connecting = asyncio.create_task(self._zygote.connect(ZYGOTE_S))
        if self._zygote_process is not None:
            ended = asyncio.create_task(self._zygote_process.wait())
            await asyncio.wait({connecting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                connecting.cancel()
                raise EngineSetupError(f"the zygote ended with status {ended.result()} at its start; see its output")
            ended.cancel()
        await connecting

    async def _revive_zygote(self) -> None:
        """The zygote's supervisor restarts it under the same address; reconnect."""
        if self._zygote.alive or self._closing:
            return
        await self._zygote.close()
        await self._connect_zygote()

    def _on_exit(self, pid: int, status: int) -> None:
        for link in list(self._links.values()):
            if link.pid == pid:
                link.exited(status)

    def _on_zygote_gone(self) -> None:
        for link in self._links.values():
            link.unwitnessed()

    # --- workers ---

    def _channel_path(self) -> Path:
        return self._options.run_dir / f"engines-{self._tag}.sock"

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = await read_frame(reader)
        hello: Report | None = None
        with contextlib.suppress(msgspec.MsgspecError):
            hello = None if frame is None else report_decoder.decode(frame)
        link = self._links.get(hello.worker) if isinstance(hello, Parked) else None
        if link is None or not isinstance(hello, Parked):
            writer.close()
            return
        await link.attach(hello, reader, writer)

    async def _fork(self, device: DeviceSpec, world: int) -> WorkerLink:
        await self._revive_zygote()
        name = f"w{self._tag}-{next(self._numbers)}"
        link = WorkerLink(name, device.id, world, self)
        self._links[name] = link
        output = None if self._options.log_dir is None else log_file(self._options.log_dir, name)
        title = f"prism: engine {name} {local_name(device.id)}"
        try:
            link.pid = await self._zygote.fork(
                WORKER_ENTRY, self._worker_args(name, device, world), title=title, log_file=output
            )
        except EngineSetupError:
            del self._links[name]
            raise
        return link

    def _worker_args(self, name: str, device: DeviceSpec, world: int) -> dict[str, Any]:
        """See :class:`prism.engine.worker.WorkerArgs`."""
        return {
            "worker": name,
            "channel": str(self._channel_path()),
            "device": local_name(device.id),
            "capacity_bytes": device.memory_bytes,
            "account_dir": str(self._options.account_dir),
            "store_dir": None if self._options.store_dir is None else str(self._options.store_dir),
            "run_dir": str(self._options.run_dir.resolve()),
            "world": world,
            "threads": self._options.threads,
            "parked_bytes": self._options.parked_bytes,
            "active_bytes": self._options.active_bytes,
            "log_dir": None if self._options.log_dir is None else str(self._options.log_dir),
            "secret_file": None if self._options.secret_file is None else str(self._options.secret_file),
        }

    async def _until_parked(self, link: WorkerLink) -> None:
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

    def on_report(self, link: WorkerLink, report: Report) -> None:
        """A parked worker has nothing to say; what comes late from one that was active is old news."""

    def on_gone(self, link: WorkerLink) -> None:
        """See :class:`prism.engine.link.WorkerOwner`."""
        if self._links.pop(link.worker, None) is not None:
            self._leftovers.ended(link.worker)
        self.memory[link.device].reap()
        if self._closing:
            return
        if link in self._parked[link.device]:
            self._parked[link.device].remove(link)
            log.warning("%s while parked", link.describe_end())
        self._refill(link.device)

    def _refill(self, device: DeviceId) -> None:
        """Fork what is missing of the device's parked workers, in the background."""
        if not self._closing:
            task = asyncio.create_task(self._refill_now(device))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _refill_now(self, device: DeviceId) -> None:
        coming = [k for k in self._links.values() if k.device == device and k.world == 1 and not k.parked.done()]
        while (
            len(self._parked[device]) + len(coming) < self._options.parked_per_device
            and self._count(device) < self._options.max_per_device
            and has_room_to_park(self._options, self.memory[device].free_bytes())
        ):
            try:
                link = await self._fork(self.devices[device], 1)
                coming.append(link)
                await self._until_parked(link)
            except EngineSetupError as error:
                log.error("no parked worker on %s: %s", device, error)
                return
            coming.remove(link)
            self._parked[device].append(link)
