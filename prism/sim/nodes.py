"""The node agents' part: instances come and go on the devices as the controller commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.core.effects import Activate, Deactivate
from prism.core.errors import InvalidValue
from prism.core.events import (
    ActivationError,
    ActivationFailed,
    ActivationFinished,
    ActivationStarted,
    DeactivationFinished,
    InstanceFound,
    InstanceLost,
)
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import ModelSpec
from prism.sim.activation import Activation
from prism.sim.device import Device
from prism.sim.engine import Engine
from prism.sim.kv import KvMemory
from prism.sim.roofline import StepCost

if TYPE_CHECKING:
    from prism.sim.world import World


@dataclass(slots=True)
class InstanceRecord:
    """An instance that exists on devices."""

    key: InstanceKey
    devices: tuple[DeviceId, ...]
    activation: Activation | None
    engine: Engine | None = None


class Nodes:
    """All node agents of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.instances: dict[InstanceKey, InstanceRecord] = {}
        self._costs: dict[tuple[ModelName, str], StepCost] = {}

    # --- commands ---

    def activate(self, effect: Activate) -> None:
        """The command arrives at the agent(s)."""
        key = effect.key
        spec = self._world.specs[effect.model]
        error = self._take_memory(effect, spec)
        if error is not None:
            self._world.control.tell(ActivationFailed(key, error))
            return
        self._world.control.tell(ActivationStarted(key))
        self._world.recorder.activation_started(effect, self._world.queue.now_s)
        record = InstanceRecord(key, effect.devices, None)
        self.instances[key] = record
        record.activation = Activation(self._world, effect, spec, self._ready)

    def deactivate(self, effect: Deactivate) -> None:
        """The command arrives at the agent(s)."""
        record = self.instances.get(effect.key)
        if record is None:
            return
        if record.engine is None:
            assert record.activation is not None
            record.activation.cancel()
            self._remove(record)
        elif effect.carry:
            self._world.devices[record.devices[0]].end_engine(record.engine)
            self._remove(record)
        else:
            self._world.devices[record.devices[0]].drain(record.engine)

    def drained(self, device: Device, engine: Engine) -> None:
        """The last request of a draining engine is done."""
        record = self.instances[engine.key]
        device.end_engine(engine)
        self._remove(record)

    def _remove(self, record: InstanceRecord) -> None:
        """Free the weights; the engines park; the controller hears of it after the unload time."""
        world = self._world
        del self.instances[record.key]
        for id in record.devices:
            world.devices[id].drop(record.key)
            if record.engine is not None or record.activation is not None:
                world.devices[id].parked += int(world.settings.cluster.engine_pool)
        world.recorder.left(record.key, world.queue.now_s)
        world.queue.after(world.cluster.timing.unload, self._tell_gone, record.key)

    def _tell_gone(self, key: InstanceKey) -> None:
        self._world.control.tell(DeactivationFinished(key))

    # --- an activation's steps ---

    def _take_memory(self, effect: Activate, spec: ModelSpec) -> ActivationError | None:
        devices = [self._world.devices.get(id) for id in effect.devices]
        key = effect.key
        held: list[Device] = []
        for rank, device in enumerate(devices):
            failed = device is None or device.gone or len(device.shards) >= self._most_engines()
            if device is not None and not failed and device.hold(key, spec.shard_weight_bytes, rank):
                held.append(device)
                continue
            for other in held:
                other.drop(key)
            return ActivationError.STALE if failed else ActivationError.NO_MEMORY
        return None

    def _most_engines(self) -> int:
        return self._world.cluster.load.max_engines_per_device

    def take_parked(self, id: DeviceId) -> float:
        """An engine of the device's pool is taken; returns the seconds until it can be (0 when one is parked)."""
        world, device = self._world, self._world.devices[id]
        timing = world.cluster.timing
        if not world.settings.cluster.engine_pool:
            return timing.engine_start
        device.parked -= 1
        if device.parked + device.starting < world.cluster.load.parked_per_device:
            device.starting += 1
            world.queue.after(timing.park, self._parked, device)
        return 0.0 if device.parked >= 0 else timing.park

    def _parked(self, device: Device) -> None:
        device.starting -= 1
        device.parked += 1

    def _ready(self, activation: Activation) -> None:
        """Weights and engine are there: the instance serves."""
        world, effect = self._world, activation.effect
        record = self.instances[effect.key]
        engine = self._make_engine(record, effect.kv_cap_bytes)
        world.recorder.ready(record.key, world.queue.now_s)
        self._serve(record, engine)
        seconds = world.queue.now_s - activation.started_s
        world.control.tell(ActivationFinished(effect.key, seconds))

    def adopt(self, key: InstanceKey, devices: tuple[DeviceId, ...]) -> None:
        """Let an instance that serves already be there. Raises :class:`InvalidValue` when it does not fit."""
        spec = self._world.specs[key.model]
        for rank, id in enumerate(devices):
            if self._world.devices[id].hold(key, spec.shard_weight_bytes, rank) is None:
                raise InvalidValue("instance", key.model, f"its weights do not fit on {id}")
            self._world.devices[id].parked -= int(self._world.settings.cluster.engine_pool)
        record = self.instances[key] = InstanceRecord(key, devices, None)
        engine = self._make_engine(record, None)
        self._world.control.tell(InstanceFound(key, whole_model(devices)))
        self._serve(record, engine)

    def _make_engine(self, record: InstanceRecord, kv_cap_bytes: int | None) -> Engine:
        """The engine of an instance whose weights are there."""
        world, spec = self._world, self._world.specs[record.key.model]
        devices = [world.devices[id] for id in record.devices]
        accounts = [device.account for device in devices]
        kv = KvMemory(accounts, _token_bytes(spec, len(devices)), world.block_tokens, kv_cap_bytes)
        return Engine(
            world.queue,
            record.key,
            self._cost(spec, devices[0]),
            kv,
            tuple(dict.fromkeys(device.pool for device in devices)),
            world.engine_limits,
            devices[0],
            spec.shard_weight_bytes,
        )

    def _serve(self, record: InstanceRecord, engine: Engine) -> None:
        record.engine, record.activation = engine, None
        devices = [self._world.devices[id] for id in record.devices]
        for device in devices:
            device.shards[record.key].engine = engine
        spec = self._world.specs[record.key.model]
        devices[0].serve(engine, spec.context_tokens, _token_bytes(spec, len(devices)))

    def _cost(self, spec: ModelSpec, device: Device) -> StepCost:
        key = (spec.name, device.gpu.name)
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = self._world.machines.cost(spec, device.gpu)
        return cost

    # --- faults ---

    def lose(self, key: InstanceKey, tell: bool) -> None:
        """An instance is gone without command (its engine died, or a device under it)."""
        record = self.instances.pop(key, None)
        if record is None:
            return
        if record.activation is not None:
            record.activation.cancel()
        if record.engine is not None:
            rank0 = self._world.devices[record.devices[0]]
            if not rank0.gone:
                rank0.end_engine(record.engine)
        for id in record.devices:
            device = self._world.devices.get(id)
            if device is not None and not device.gone:
                device.drop(key)
                device.starting += 1
                self._world.queue.after(self._world.cluster.timing.park, self._parked, device)
        self._world.recorder.left(key, self._world.queue.now_s)
        if tell:
            self._world.control.tell(InstanceLost(key))


def _token_bytes(spec: ModelSpec, tp: int) -> int:
    """KV bytes of a token on each of ``tp`` devices; KV heads are not split further than one per device."""
    return max(1, spec.shape.kv_bytes_per_token // min(tp, spec.shape.kv_heads))
