"""The engines of one machine: models active in worker processes (:mod:`prism.engine.workers`)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from prism import memory
from prism.core.ids import DeviceId, EngineId
from prism.core.instances import InstanceKey, Part, Role
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec, Scheduling
from prism.engine.activating import Activating
from prism.engine.api import longest_activation_s
from prism.engine.commands import Activated, ActivateModel, build_name
from prism.engine.errors import ActivationCause, CannotActivate, EngineSetupError, NoSeat
from prism.engine.gpu import mps_remark
from prism.engine.handle import EngineHandle
from prism.engine.leftovers import help_socket, rendezvous_file
from prism.engine.link import WorkerLink, until_gone
from prism.engine.load_helpers import LoadHelpers
from prism.engine.options import PoolOptions
from prism.engine.sglang_args import group_shape, server_arguments
from prism.engine.workers import Workers
from prism.policy.profiles import prefill_on

log = logging.getLogger(__name__)


class EnginePool:
    """See :class:`prism.engine.api.Engines`."""

    def __init__(self, devices: Sequence[DeviceSpec], options: PoolOptions) -> None:
        self._workers, self._options = Workers(devices, options), options
        self.helpers = LoadHelpers(devices, options.account_dir, options.load_helpers)
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

    def faults(self) -> Mapping[DeviceId, str]:
        return self._workers.faults()

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
        first_pieces: Sequence[int] = (),
        turn: tuple[int, int] = (0, 1),
    ) -> EngineHandle:
        """``first_pieces``: the engine is there as soon as these pieces are; its requests wait for a route
        (:class:`prism.engine.remote_orders.RemoteOrders`)."""
        self._check(spec, part)
        names = part.devices
        limit_s = longest_activation_s(spec) if timeout_s is None else timeout_s
        kind = self._workers.devices[names[0]].kind
        arguments = msgspec.json.encode(server_arguments(spec, kind, self._options.overlap))
        build = build_name(arguments, kv_limit_bytes, spec.tp)
        try:
            links = await self._workers.take(names, group_shape(spec), build)
        except NoSeat as error:
            raise CannotActivate(spec.name, names, ActivationCause.OUT_OF_MEMORY, str(error)) from error
        except EngineSetupError as error:
            raise CannotActivate(spec.name, names, ActivationCause.ENGINE_DIED, str(error)) from error
        engine = EngineId(f"{key}@{links[0].worker}-{next(self._numbers)}")
        self._nudge(names)
        try:
            with self.helpers.during(names, self._workers.parked_on) as helpers:
                activated = await self._command(
                    engine, spec, links, arguments, kv_limit_bytes, limit_s, mark, (first_pieces, turn), helpers
                )
        except BaseException:
            self._workers.release(links, reusable=False)
            await until_gone(links)
            raise
        handle = EngineHandle(engine, key, links, activated, kind, self._forget(engine))
        if handle.alive:
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
        arguments: bytes,
        kv_limit_bytes: int | None,
        timeout_s: float,
        mark: str,
        begins: tuple[Sequence[int], tuple[int, int]],
        helpers: Mapping[DeviceId, Sequence[WorkerLink]],
    ) -> Activated:
        """Send the ranks their commands and await all answers; the slowest rank's phases count. ``begins``: with which
        pieces, and in which turn."""
        activating = Activating(spec, links)
        rendezvous = rendezvous_file(self._options.run_dir.resolve(), links[0].worker, ranks=True)
        for rank, link in enumerate(links):
            link.send(
                ActivateModel(
                    engine=engine,
                    model=spec.name,
                    server_args=arguments,
                    rank=rank,
                    world=spec.tp,
                    rendezvous=f"file://{rendezvous}",
                    limit_bytes=kv_limit_bytes,
                    mark=mark,
                    weight_bytes=spec.weight_bytes,
                    first_pieces=list(begins[0]),
                    turn=begins[1][0],
                    turns=begins[1][1],
                    fair=spec.scheduling is Scheduling.FAIR,
                    prefill_tokens_per_s=prefill_on(spec, self._workers.devices[links[0].device].kind, 0.0),
                    borrows=spec.lending.borrows,
                    helpers={helper.device: self._desk(helper) for helper in helpers[link.device]},
                )
            )
        return await activating.done(timeout_s)

    def _desk(self, helper: WorkerLink) -> str:
        return str(help_socket(self._options.run_dir.resolve(), helper.worker))
