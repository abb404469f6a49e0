"""The worker processes of one machine: the zygote they come from, those that start, and those that are parked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from prism import memory
from prism.core.ids import DeviceId, local_name
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.commands import Crashed, Report
from prism.engine.errors import EngineSetupError, NoSeat
from prism.engine.gpu_faults import STRIKES, DeviceFaults, concerns_whole_gpu
from prism.engine.launching import Launcher
from prism.engine.link import WorkerLink, until_gone
from prism.engine.options import PoolOptions
from prism.engine.outside import has_room_to_park, most_parked
from prism.engine.parking import ParkedTeams, Team, devices_of
from prism.memory.gpus import mps_runs

log = logging.getLogger(__name__)

RETRY_S: Final = 15.0
"""After a worker could not start: a GPU may come back."""


class Workers:
    """Forks, parks and ends workers. ``memory`` has the devices' accounts after :meth:`start`."""

    def __init__(self, devices: Sequence[DeviceSpec], options: PoolOptions) -> None:
        self._options = options
        self.devices = {d.id: d for d in devices}
        self.memory: dict[DeviceId, memory.Device] = {}
        kind = next((d.kind.value for d in devices), DeviceKind.HOST.value)
        self._launcher = Launcher(options, kind, self, self._on_last_words)
        self._parking = ParkedTeams()
        self._faults = DeviceFaults()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Reach (or start) the zygote and park the first workers. Raises :class:`EngineSetupError`."""
        for directory in (
            self._options.run_dir,
            self._options.account_dir,
            *([self._options.log_dir] if self._options.log_dir else []),
        ):
            directory.mkdir(parents=True, exist_ok=True)
        for device in self.devices.values():
            self.memory[device.id] = memory.open_device(
                local_name(device.id), device.memory_bytes, account_dir=self._options.account_dir
            )
        await self._launcher.start()
        await asyncio.gather(*(self._park_first(device) for device in self.devices.values()))
        if len(reasons := self._faults.reasons()) == len(self.devices) and self._options.parked_per_device:
            raise EngineSetupError("; ".join(f"{device}: {reason}" for device, reason in reasons.items()))

    async def _park_first(self, device: DeviceSpec) -> None:
        """A GPU on which no worker starts is out of service; the others serve."""
        for _ in range(self._options.parked_per_device):
            if not has_room_to_park(self._options, self.memory[device.id].free_bytes()):
                return
            for _ in range(STRIKES):
                try:
                    link = await self._launcher.fork(device, 1)
                    await self._until_parked(link)
                    self._parking.put((link,), used=False)
                    break
                except EngineSetupError as error:
                    if device.kind is not DeviceKind.CUDA:
                        raise
                    log.error("no parked worker on %s: %s", device.id, error)

    async def close(self) -> None:
        """End every worker, and the zygote if it is ours."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await until_gone(list(self._launcher.links.values()))
        await self._launcher.close()

    async def take(self, devices: Sequence[DeviceId], shape: str, build: str) -> list[WorkerLink]:
        """A parked team on ``devices``, one worker each, with process groups of ``shape``, that keeps ``build`` if one
        does; forks one if none is there. Raises :class:`EngineSetupError`; :class:`NoSeat` when a device has as many
        workers as it may."""
        for device, reason in self._faults.reasons().items():
            if device in devices:
                raise EngineSetupError(f"{device} is out of service: {reason}")
        team = self._parking.take(devices, shape, build)
        if team is None:
            for device in devices:
                self._make_room(device)
            return await self._fork_team(devices, shape)
        if len(team) == 1:
            self._refill(devices[0])
        return list(team)

    async def _fork_team(self, devices: Sequence[DeviceId], shape: str) -> list[WorkerLink]:
        forking = (self._launcher.fork(self.devices[device], len(devices), shape) for device in devices)
        forked = await asyncio.gather(*forking, return_exceptions=True)
        links = [link for link in forked if isinstance(link, WorkerLink)]
        try:
            for failed in forked:
                if isinstance(failed, BaseException):
                    raise failed
            await asyncio.gather(*(self._until_parked(link) for link in links))
        except BaseException:
            self._end(links)
            raise
        return links

    async def _until_parked(self, link: WorkerLink) -> None:
        try:
            await self._launcher.until_parked(link)
        except EngineSetupError:
            if link.last_words is not None or link.crashed:
                self._faults.failed(link.device, link.describe_end())
            raise
        self._faults.started(link.device)

    def parked_on(self, device: DeviceId) -> WorkerLink | None:
        """A worker that has no model and would be taken last; None: there is none, or the device is out of service."""
        return None if device in self._faults.reasons() else self._parking.helper(device)

    def _make_room(self, device: DeviceId) -> None:
        """Room for one worker more on ``device``, if need be in place of a parked team."""
        most = self._options.max_per_device
        if self._count(device) < most:
            return
        spare = self._parking.give_up(device)
        if not spare:
            raise NoSeat(f"{device} has {most} workers, as many as it may (max_per_device)")
        self._end(spare)

    def _count(self, device: DeviceId) -> int:
        return sum(link.device == device for link in self._launcher.links.values())

    def release(self, links: Sequence[WorkerLink], reusable: bool) -> None:
        """Workers of an engine that is over: back to the parked ones, or killed."""
        for link in links:
            link.hand_to(self)
        if not reusable or self._closing or any(link.gone.is_set() for link in links):
            self._end(links)
            return
        self._park(tuple(links), used=True)

    def _park(self, team: Team, *, used: bool) -> None:
        self._parking.put(team, used=used)
        for spare in self._parking.on(devices_of(team), team[0].shape)[min(map(self._most_parked, devices_of(team))) :]:
            self._end(spare)

    def _most_parked(self, device: DeviceId) -> int:
        account = self.memory[device]
        return most_parked(self._options, account.free_bytes(), account.wanted_bytes())

    def _end(self, links: Sequence[WorkerLink]) -> None:
        """Kill them, and parked ranks that are of no use without them. Nobody is given one any more."""
        for link in links:
            for one in (link, *self._parking.lose(link)):
                one.kill()

    def faults(self) -> Mapping[DeviceId, str]:
        """See :meth:`prism.engine.api.Engines.faults`."""
        return self._faults.reasons()

    def counts(self) -> Mapping[DeviceId, Mapping[str, int]]:
        """See :meth:`prism.engine.api.Engines.counts`."""
        found = {device: {"starting": 0, "parked": 0, "active": 0} for device in self.devices}
        for link in self._launcher.links.values():
            parked = "parked" if link in self._parking else "active"
            found[link.device][parked if link.parked.done() else "starting"] += 1
        return found

    def on_report(self, link: WorkerLink, report: Report) -> None:
        """A parked worker has nothing to say; what comes late from one that was active is old news."""

    def on_gone(self, link: WorkerLink) -> None:
        """See :class:`prism.engine.link.WorkerOwner`."""
        self._launcher.forget(link)
        self.memory[link.device].reap()
        if self._closing:
            return
        if team := self._parking.lose(link):
            log.warning("%s while parked", link.describe_end())
            self._end(team)
        self._refill(link.device)

    def _on_last_words(self, link: WorkerLink, words: Crashed) -> None:
        """When the fault was not of one process, all of the device are replaced: a GPU under MPS takes no new ones
        while old ones live."""
        if words.cuda is None or self._closing or not concerns_whole_gpu(words.cuda, mps_runs()):
            return
        others = [k for k in self._launcher.links.values() if k.device == link.device and k is not link]
        log.error("%s: its other %d workers are replaced: %s", link.device, len(others), words.reason)
        self._end(others)

    def _refill(self, device: DeviceId) -> None:
        """Fork what is missing of the device's parked workers, in the background."""
        if not self._closing:
            task = asyncio.create_task(self._refill_now(device))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _refill_now(self, device: DeviceId) -> None:
        coming = [
            k for k in self._launcher.links.values() if k.device == device and k.world == 1 and not k.parked.done()
        ]
        while (
            len(self._parking.on([device], "")) + len(coming) < self._options.parked_per_device
            and self._count(device) < self._options.max_per_device
            and has_room_to_park(self._options, self.memory[device].free_bytes())
        ):
            try:
                link = await self._launcher.fork(self.devices[device], 1)
                coming.append(link)
                await self._until_parked(link)
            except EngineSetupError as error:
                log.error("no parked worker on %s: %s", device, error)
                asyncio.get_running_loop().call_later(RETRY_S, self._refill, device)
                return
            coming.remove(link)
            self._park((link,), used=False)  # models may have left others meanwhile
