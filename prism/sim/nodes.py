"""The node agents' part: instances come and go on the devices as the controller commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from prism.core.device_events import WaitingShared
from prism.core.effects import Activate, Deactivate, ShareWaiting
from prism.core.errors import InvalidValue
from prism.core.events import (
    ActivationError,
    ActivationFailed,
    ActivationFinished,
    ClusterEvent,
    DeactivationFinished,
    InstanceFound,
    InstanceLost,
)
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey, Parts, devices_of, queue_device, whole_model
from prism.core.settings import LiveMode
from prism.core.specs import ModelSpec
from prism.scheduler.instance_life import InstanceStep, Steps
from prism.sim.activation import Activation
from prism.sim.cluster_sections import TimingSection
from prism.sim.device import SimDevice
from prism.sim.engine import Engine
from prism.sim.engines import EngineMaker
from prism.sim.instance import SimInstance
from prism.sim.links import Link
from prism.sim.live_starts import LiveStarts
from prism.sim.parking import Parking
from prism.sim.pipelines import SimSeat
from prism.sim.queue import EventQueue
from prism.sim.recorder import RunRecorder
from prism.sim.weight_roads import WeightRoads


class Nodes:
    """All node agents of the world. ``tell`` takes what the cluster scheduler has to hear; a device holds parts of
    ``most_instances`` instances at most."""

    def __init__(
        self,
        queue: EventQueue,
        timing: TimingSection,
        specs: Mapping[ModelName, ModelSpec],
        devices: Mapping[DeviceId, SimDevice],
        engines: EngineMaker,
        parking: Parking,
        roads: WeightRoads,
        recorder: RunRecorder,
        tell: Callable[[ClusterEvent], None],
    ) -> None:
        self._queue, self._timing, self._specs, self._devices = queue, timing, specs, devices
        self._engines, self._parking, self._roads = engines, parking, roads
        self._recorder, self._tell = recorder, tell
        self.instances: dict[InstanceKey, SimInstance] = {}
        self._live = LiveStarts(self.instances, specs, devices, roads, self._ready)
        self._together: dict[ModelName, list[Activate]] = {}
        """Orders that came in this moment and form pipelines, or get weights from other nodes, by model."""

    # --- commands ---

    def activate(self, effect: Activate) -> None:
        """The command arrives at the agent(s). Those that form pipelines, or whose weights come from elsewhere, wait
        for the others of this moment."""
        if effect.live is not LiveMode.PIPELINES and self._has_weights(effect):
            if self._takes_memory(effect):
                self._begin(effect, SimSeat())
            return
        together = self._together.setdefault(effect.model, [])
        if not together:
            self._queue.after(0.0, self._activate_together, effect.model)
        together.append(effect)

    def _activate_together(self, model: ModelName) -> None:
        """Who sends something already is sent to last (:mod:`prism.policy.multicast.planner`)."""
        orders = [effect for effect in self._together.pop(model) if self._takes_memory(effect)]
        orders.sort(key=lambda effect: any(self._roads.sends(part.node) for part in effect.parts))
        seats = self._live.seats([effect for effect in orders if effect.live is LiveMode.PIPELINES])
        for effect in orders:
            self._begin(effect, seats.get(effect.key, SimSeat()))

    def _has_weights(self, effect: Activate) -> bool:
        return all(self._roads.host_cache.has(part.node, effect.model) for part in effect.parts)

    def _takes_memory(self, effect: Activate) -> bool:
        error = self._take_memory(effect.key, effect.parts)
        if error is None:
            return True
        self._report(effect.devices)
        self._tell(ActivationFailed(effect.key, error))
        return False

    def _begin(self, effect: Activate, seat: SimSeat) -> None:
        self._recorder.activation_started(effect, self._queue.now_s)
        record = self._record(effect.key, effect.parts)
        lead = self._lead(record)
        taken = [self._parking.take(device, effect.key) for device in record.devices]
        spec, marks = self._specs[effect.model], self._live.marks(effect, seat)
        record.activation = Activation(
            self._queue,
            self._roads,
            self._timing,
            effect,
            spec,
            lead.gpu,
            lead.pool,
            max([each.in_s for each in taken]),
            all(each.wakes for each in taken),
            self._loaded,
            marks,
            seat.group,
        )

    def deactivate(self, effect: Deactivate) -> None:
        """The command arrives at the agent(s)."""
        record = self.instances.get(effect.key)
        if record is not None:
            running = self._lead(record).requests.running(record.key)
            self._follow(record, record.life.leave(effect.carry, running, self._queue.now_s))

    def share_waiting(self, effect: ShareWaiting) -> None:
        """The command arrives at the agent."""
        if (device := self._devices.get(effect.device)) is not None and not device.gone:
            device.tell(WaitingShared(effect.key, effect.kept_share))

    def emptied(self, engine: Engine) -> None:
        """The last request of a draining engine is done."""
        record = self.instances[engine.key]
        self._follow(record, record.life.emptied())

    def _drained_long(self, record: SimInstance) -> None:
        self._follow(record, record.life.pass_time(self._queue.now_s))

    def _loaded(self, activation: Activation) -> None:
        """Weights and engine are there."""
        record = self.instances[activation.effect.key]
        if record.engine is None:
            self._ready(record)
        else:
            self._live.alone(record)
            self._report(record.devices)

    def _ready(self, record: SimInstance) -> None:
        self._recorder.ready(record.key, self._queue.now_s)
        self._follow(record, record.life.loaded(self._queue.now_s))

    def adopt(self, key: InstanceKey, devices: tuple[DeviceId, ...]) -> None:
        """Let an instance that serves already be there. Raises :class:`InvalidValue` when it does not fit."""
        parts = whole_model(devices)
        for id in devices:
            if not self._hold(key, parts, self._devices[id]):
                raise InvalidValue("instance", key.model, f"its weights do not fit on {id}")
            self._parking.adopt(id)
        record = self._record(key, parts)
        self._tell(InstanceFound(key, parts))
        self._follow(record, record.life.loaded(self._queue.now_s))

    # --- an instance's steps ---

    def _follow(self, record: SimInstance, steps: Steps) -> None:
        """Do what the instance's life wants next."""
        for step in steps:
            match step:
                case InstanceStep.SERVE:
                    self._serve(record)
                case InstanceStep.STOP_ADMITTING:
                    assert record.engine is not None  # it serves
                    if record.life.drained_by_s < float("inf"):
                        record.late.set(record.life.drained_by_s)
                    self._lead(record).stop_admitting(record.engine)
                case InstanceStep.END:
                    self._end(record)

    def _serve(self, record: SimInstance) -> None:
        spec, lead = self._specs[record.key.model], self._lead(record)
        devices = [self._devices[id] for id in record.devices]
        activation = record.activation
        kv_cap_bytes = None if activation is None else activation.effect.kv_cap_bytes
        engine = record.engine = self._engines.make(record.key, spec, devices, kv_cap_bytes)
        for device in devices:
            shard = device.shards[record.key]
            shard.kv, shard.lead = engine.kv, lead.scheduler
        self._live.begins(record)
        lead.serve(engine, spec)
        if activation is not None:
            self._report(record.devices)
            seconds = self._queue.now_s - activation.started_s
            self._tell(ActivationFinished(record.key, seconds, early=not activation.over))

    def _end(self, record: SimInstance) -> None:
        """Free engine and weights; the engines park; the controller hears of it after the unload time."""
        assert record.engine is not None  # it serves
        record.late.clear()
        self._lead(record).end_engine(record.engine)
        del self.instances[record.key]
        self._live.gone(record)
        for id in record.devices:
            self._devices[id].drop(record.key)
            self._parking.put_back(id, record.key)
        self._recorder.left(record.key, self._queue.now_s)
        self._queue.after(self._timing.unload, self._tell_gone, record)

    def _tell_gone(self, record: SimInstance) -> None:
        self._report(record.devices)
        self._tell(DeactivationFinished(record.key))

    def _report(self, devices: Collection[DeviceId]) -> None:
        """Whoever hears of an instance has the numbers that go with it."""
        for id in devices:
            device = self._devices.get(id)
            if device is not None and not device.gone:
                device.report_now()

    # --- memory ---

    def _take_memory(self, key: InstanceKey, parts: Parts) -> ActivationError | None:
        held: list[SimDevice] = []
        for id in devices_of(parts):
            device = self._devices.get(id)
            full = device is None or device.gone or len(device.shards) >= self._roads.load.max_engines_per_device
            if device is not None and not full and self._hold(key, parts, device):
                held.append(device)
                continue
            for other in held:
                other.drop(key)
            return ActivationError.STALE if full else ActivationError.NO_MEMORY
        return None

    def _hold(self, key: InstanceKey, parts: Parts, device: SimDevice) -> bool:
        nbytes = self._specs[key.model].shard_weight_bytes
        return device.hold(key, nbytes, leads=device.id == queue_device(parts)) is not None

    def _record(self, key: InstanceKey, parts: Parts) -> SimInstance:
        record = SimInstance(key, parts, self._queue.alarm(self._drained_long))
        record.late.arg = record
        self.instances[key] = record
        return record

    def _lead(self, record: SimInstance) -> SimDevice:
        return self._devices[queue_device(record.parts)]

    # --- faults ---

    def lose_instance(self, key: InstanceKey) -> None:
        """The engine has died."""
        record = self.instances[key]
        self._lose(record)
        self._tell(InstanceLost(key))
        self._report(record.devices)

    def lose_devices(self, gone: Collection[DeviceId]) -> None:
        """The devices are gone, and with them every instance that has a part there."""
        for record in list(self.instances.values()):
            if not set(record.devices).isdisjoint(gone):
                self._lose(record)

    def lose_links(self, links: set[Link]) -> None:
        """The links are gone: what is on its way over them comes another way."""
        for record in self.instances.values():
            if record.activation is not None and not record.activation.over:
                record.activation.links_lost(links)

    def _lose(self, record: SimInstance) -> None:
        del self.instances[record.key]
        record.late.clear()
        record.life.lost()
        if record.engine is not None:
            lead = self._lead(record)
            if not lead.gone:
                lead.end_engine(record.engine)
        self._live.gone(record)
        for id in record.devices:
            device = self._devices[id]
            if not device.gone:
                device.drop(record.key)
                self._parking.lose(id, record.key)
        self._recorder.left(record.key, self._queue.now_s)
