"""The engines of one machine: models active in worker processes (:mod:`prism.engine.workers`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from prism import memory
from prism.core.ids import DeviceId, EngineId
from prism.core.instances import InstanceKey, Part, Role
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec
from prism.engine.api import longest_activation_s
from prism.engine.commands import Activated, ActivateModel, NotActivated, Report
from prism.engine.errors import ActivationCause, CannotActivate, EngineSetupError, NoSeat
from prism.engine.gpu import mps_remark
from prism.engine.handle import EngineHandle
from prism.engine.leftovers import rendezvous_file
from prism.engine.link import WorkerLink, until_gone
from prism.engine.sglang_args import server_arguments
from prism.engine.workers import Workers

log = logging.getLogger(__name__)


class EnginePool:
    """See :class:`prism.engine.api.Engines`.

    ``run_dir`` holds sockets (keep its path short), ``account_dir`` the devices' accounts, ``store_dir`` the packed
    weights (None: every activation reads the model's files). Without ``zygote_socket`` the pool runs a zygote of its
    own and ends it in :meth:`close`. A device has at most ``max_per_device`` workers (so many models, too);
    ``parked_per_device`` 0 means that each activation starts its own. ``threads`` compute on a virtual device.
    ``secret_file`` holds the fleet's secret, for front doors on other machines.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        *,
        run_dir: Path,
        account_dir: Path,
        store_dir: Path | None = None,
        zygote_socket: Path | None = None,
        parked_per_device: int = 1,
        max_per_device: int = 8,
        start_timeout_s: float = 180.0,
        threads: int = 1,
        log_dir: Path | None = None,
        secret_file: Path | None = None,
    ) -> None:
        self._workers = Workers(
            devices,
            run_dir=run_dir,
            account_dir=account_dir,
            store_dir=store_dir,
            zygote_socket=zygote_socket,
            parked_per_device=parked_per_device,
            max_per_device=max_per_device,
            start_timeout_s=start_timeout_s,
            threads=threads,
            log_dir=log_dir,
            secret_file=secret_file,
        )
        self._numbers = itertools.count(1)
        self._handles: dict[EngineId, EngineHandle] = {}

    async def start(self) -> None:
        await self._workers.start()
        if any(d.kind is DeviceKind.CUDA for d in self._workers.devices.values()):
            log.warning(mps_remark())

    async def close(self) -> None:
        for handle in list(self._handles.values()):
            handle.give_up()
        await self._workers.close()

    def counts(self) -> Mapping[DeviceId, Mapping[str, int]]:
        return self._workers.counts()

    @property
    def memory(self) -> Mapping[DeviceId, memory.Device]:
        """The devices' accounts, after :meth:`start`: for reports of free and mapped bytes."""
        return self._workers.memory

    async def activate(
        self,
        key: InstanceKey,
        spec: ModelSpec,
        part: Part,
        *,
        kv_limit_bytes: int | None = None,
        timeout_s: float | None = None,
        mark: str = "",
    ) -> EngineHandle:
        self._check(spec, part)
        names = part.devices
        limit_s = longest_activation_s(spec) if timeout_s is None else timeout_s
        try:
            links = list(await asyncio.gather(*(self._workers.take(d, spec.tp) for d in names)))
        except NoSeat as error:
            raise CannotActivate(spec.name, names, ActivationCause.OUT_OF_MEMORY, str(error)) from error
        except EngineSetupError as error:
            raise CannotActivate(spec.name, names, ActivationCause.ENGINE_DIED, str(error)) from error
        kind = self._workers.devices[names[0]].kind
        engine = EngineId(f"{key}@{links[0].worker}-{next(self._numbers)}")
        self._nudge(names)
        try:
            activated = await self._command(engine, spec, links, kv_limit_bytes, limit_s, mark)
        except BaseException:
            self._workers.release(links, reusable=False)
            await until_gone(links)
            raise
        handle = EngineHandle(engine, key, links, activated.phases, activated.info, kind, self._forget(engine))
        self._handles[engine] = handle
        return handle

    def _forget(self, engine: EngineId) -> Callable[[Sequence[WorkerLink], bool], None]:
        def release(links: Sequence[WorkerLink], reusable: bool) -> None:
            self._handles.pop(engine, None)
            self._workers.release(links, reusable)

        return release

    def _nudge(self, devices: Sequence[DeviceId]) -> None:
        for handle in self._handles.values():
            if set(handle.devices) & set(devices):
                handle.nudge()

    def _check(self, spec: ModelSpec, part: Part) -> None:
        names = part.devices
        if not part.is_whole_model:
            layers = "all layers" if part.layers is None else f"layers {part.layers}"
            detail = f"the part has role {part.role} and {layers}; engines run all layers in the role {Role.WHOLE} only"
            raise CannotActivate(spec.name, names, ActivationCause.UNSUPPORTED, detail)
        if len(names) != spec.tp:
            detail = f"tensor-parallel size {spec.tp} needs as many devices, got {len(names)}"
            raise CannotActivate(spec.name, names, ActivationCause.UNSUPPORTED, detail)
        for device in names:
            if device not in self._workers.devices:
                detail = f"no device {device} here; there are {', '.join(self._workers.devices)}"
                raise CannotActivate(spec.name, names, ActivationCause.UNSUPPORTED, detail)
            if spec.shard_weight_bytes > self._workers.devices[device].memory_bytes:
                have = self._workers.devices[device].memory_bytes
                detail = f"its weights need {spec.shard_weight_bytes} bytes, the device has {have}"
                raise CannotActivate(spec.name, names, ActivationCause.TOO_LARGE, detail)
        path = Path(spec.path)
        if (path.is_absolute() or spec.path.startswith(".")) and not (path / "config.json").is_file():
            detail = f"{path / 'config.json'} does not exist"
            raise CannotActivate(spec.name, names, ActivationCause.MISSING, detail)

    async def _command(
        self,
        engine: EngineId,
        spec: ModelSpec,
        links: Sequence[WorkerLink],
        kv_limit_bytes: int | None,
        timeout_s: float,
        mark: str,
    ) -> Activated:
        """Send the ranks their commands and await all answers; the slowest rank's phases count."""
        loop = asyncio.get_running_loop()
        answers: dict[str, asyncio.Future[Activated]] = {link.worker: loop.create_future() for link in links}
        names = tuple(link.device for link in links)

        def on_report(link: WorkerLink, report: Report) -> None:
            answer = answers[link.worker]
            if isinstance(report, Activated) and not answer.done():
                answer.set_result(report)
            elif isinstance(report, NotActivated) and not answer.done():
                cause = ActivationCause(report.cause)
                answer.set_exception(CannotActivate(spec.name, names, cause, report.detail))

        def on_gone(link: WorkerLink) -> None:
            answer = answers[link.worker]
            if not answer.done():
                detail = link.describe_end()
                answer.set_exception(CannotActivate(spec.name, names, ActivationCause.ENGINE_DIED, detail))

        rendezvous = rendezvous_file(self._workers.run_dir.resolve(), links[0].worker, ranks=True)
        for rank, link in enumerate(links):
            link.on_report, link.on_gone = on_report, on_gone
            if link.gone.is_set():
                on_gone(link)
            link.send(
                ActivateModel(
                    engine=engine,
                    model=spec.name,
                    server_args=msgspec.json.encode(server_arguments(spec, self._workers.devices[link.device].kind)),
                    rank=rank,
                    world=spec.tp,
                    rendezvous=f"file://{rendezvous}",
                    limit_bytes=kv_limit_bytes,
                    mark=mark,
                    weight_bytes=spec.weight_bytes,
                )
            )
        try:
            async with asyncio.timeout(timeout_s):
                done = await asyncio.gather(*answers.values())
        except TimeoutError:
            detail = f"not ready after {timeout_s:.0f} s"
            raise CannotActivate(spec.name, names, ActivationCause.TIMEOUT, detail) from None
        finally:
            for answer in answers.values():
                answer.cancel()
        return max(done, key=lambda a: sum(a.phases.values()))
