"""What decoding costs on every device of the fleet, as far as its reports say (:mod:`prism.policy.device_time`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from prism.core.events import DeviceReport, InstanceLoad
from prism.core.ids import DeviceId, ModelName
from prism.core.settings import ClusterSettings, Placement
from prism.core.specs import DeviceKind, DeviceRates
from prism.core.views import InstanceState
from prism.policy.device_time import (
    GUESSES,
    Batch,
    TimeCorrections,
    alone_s,
    bandwidth_share,
    room_within,
    slowdown,
    step_of,
)
from prism.policy.goodput import SharingModel, Site
from prism.policy.profiles import rates_on
from prism.policy.work import ShardDemand
from prism.scheduler.fleet import Fleet
from prism.scheduler.records import DeviceRecord, InstanceRecord, ModelRecord

_NOTHING: Final = 1e-3
"""A load that is as good as none."""
_REMEMBERED_S: Final = 30.0
"""Time constant of what an instance is expected to take over time."""
_ANSWER_S: Final = 1.0
"""How long a request is believed to run at least: its model runs unless none came in so long."""
_LEAST_DUTY: Final = 0.1
_LEAST_KV: Final = 0.1
"""A model that is looked for a place is expected to run for such a share of the time at least, and to hold KV of such a
share of its weights."""


class DeviceTimes:
    """Owns what was learned of step times, and the bandwidth load of the devices."""

    def __init__(self, fleet: Fleet, models: Mapping[ModelName, ModelRecord], settings: ClusterSettings) -> None:
        """What instances take over time is followed where it is asked for (``placement: goodput``)."""
        self._fleet, self._models = fleet, models
        self._by_work = settings.placement is Placement.GOODPUT
        self._exchanges = settings.exchanges
        self._answers = dict(settings.expected_output_tokens)
        self._told_nothing = not settings.expected_rates
        self._begun = 0
        """Models that began without having been seen before."""
        self.corrections = TimeCorrections()

    def settle(self, id: DeviceId, now_s: float) -> None:
        """What instances whose requests stand at ``id`` have done since their last report goes into their means: call
        before a report is taken."""
        if not self._by_work:
            return
        for instance in self._fleet.devices[id].instances.values():
            if instance.queue_device == id and instance.settled_s != now_s:
                self._settle(instance, now_s)

    def _settle(self, instance: InstanceRecord, now_s: float) -> None:
        """It has done until now what it did at its last report; once a moment is enough."""
        held = self._fleet.devices[instance.queue_device].busy_kv.get(instance.key, 0) if instance.running else 0
        keep = math.exp((instance.settled_s - now_s) / _REMEMBERED_S)
        instance.duty = instance.duty * keep + (1.0 - keep) * (instance.running > 0)
        instance.kv_mean_bytes = instance.kv_mean_bytes * keep + (1.0 - keep) * held
        if self._exchanges:
            instance.settle_lately(now_s)
        instance.settled_s = now_s

    def refresh(self, now_s: float) -> None:
        """Expected work of all instances as of now: those that rest are not reported."""
        if self._by_work:
            for device in self._fleet.devices.values():
                self._count_work(device, now_s)

    def on_start(self, model: ModelRecord, instance: InstanceRecord, rate_per_s: float, now_s: float) -> None:
        """A new instance, not in the fleet's books yet, is believed to be like its model's last one."""
        instance.duty, instance.kv_mean_bytes = max(model.duty, self._first_duty(model)), model.kv_mean_bytes
        instance.settled_s = now_s
        instance.lately = max((i.lately for i in model.instances), default=0.0)
        instance.requests_lately = max((i.requests_lately for i in model.instances), default=0.0)
        demand = self.demand_of(model, instance.queue_device, rate_per_s)
        self._begun += model.duty == 0.0
        instance.work, instance.kv_work_bytes = demand.work, demand.kv_bytes

    def demand_of(self, model: ModelRecord, id: DeviceId, rate_per_s: float) -> ShardDemand:
        """What one shard of the model, with so many requests per second, is expected to bring to ``id`` over time."""
        weight_bytes = model.spec.shard_weight_bytes
        kv_bytes = max(model.kv_mean_bytes, _LEAST_KV * weight_bytes)
        rates = rates_on(model.spec, self._fleet.devices[id].spec.kind)
        share = bandwidth_share(rates, Batch(weight_bytes, int(kv_bytes), 1))
        duty = max(_LEAST_DUTY, self._first_duty(model), model.duty, _duty_at(rate_per_s))
        return ShardDemand(duty * share, kv_bytes, weight_bytes)

    def _first_duty(self, model: ModelRecord) -> float:
        """Of a model that never ran, where the catalog expects nothing. Who is asked first is asked most, as a rule:
        the n-th to begin is believed to run for 1/n of the time, as popularity falls with rank (Zipf), until it was
        seen."""
        return 1.0 / (1 + self._begun) if self._told_nothing and model.duty == 0.0 else 0.0

    def site_of(self, id: DeviceId) -> Site:
        """The device with all that is placed there and stays."""
        device = self._fleet.devices[id]
        stays = [i for i in device.instances.values() if i.state is not InstanceState.DRAINING]
        memory_bytes = float(self._fleet.board.capacity[self._fleet.index[id]])
        return Site(id, memory_bytes, tuple([self._tenant(device, i) for i in stays]))

    def _tenant(self, device: DeviceRecord, instance: InstanceRecord) -> SharingModel:
        """As it was lately; one that was not seen yet as its rate lets expect. The same few devices are asked at every
        look for a place: what follows from the same numbers is not computed again."""
        id, model = device.spec.id, self._models[instance.model]
        now_bytes = float(device.busy_kv.get(instance.key, 0) * (instance.running > 0))
        factor = self.corrections.factor(id, model.name)
        here, asked = (instance.duty, instance.kv_mean_bytes, now_bytes), (model.weighted_rate, len(model.instances))
        of = id, model.spec, here, asked, factor
        if instance.tenant is not None and instance.tenant[0] == of:
            return instance.tenant[1]
        rate_per_s = model.weighted_rate * model.spec.slo_ttft_s / len(model.instances)
        weight_bytes = self._fleet.board.weights_bytes(self._fleet.index[id], instance.shards[id])
        duty = max(instance.duty, self._duty_at(model, rate_per_s))
        busy_bytes = max(now_bytes, instance.kv_mean_bytes / max(_LEAST_DUTY, duty))
        held_bytes = max(now_bytes, instance.kv_mean_bytes)
        tenant = self.tenant_with(id, model, rate_per_s, duty, (busy_bytes, held_bytes), weight_bytes)
        instance.tenant = of, tenant
        return tenant

    def newcomer(
        self, model: ModelRecord, id: DeviceId, rate_per_s: float, kv_bytes: float | None = None
    ) -> SharingModel:
        """One shard of the model as it would be on ``id`` with so many requests per second, and with ``kv_bytes`` while
        it decodes (none: what an instance had in the mean)."""
        weight_bytes = model.spec.shard_weight_bytes + self._fleet.devices[id].spec.engine_bytes
        duty = max(model.duty, self._first_duty(model), self._duty_at(model, rate_per_s))
        mean_bytes = model.kv_mean_bytes if kv_bytes is None else kv_bytes * duty
        return self.tenant_with(
            id, model, rate_per_s, duty, (mean_bytes / max(_LEAST_DUTY, duty), mean_bytes), weight_bytes
        )

    def tenant_with(
        self,
        id: DeviceId,
        model: ModelRecord,
        rate_per_s: float,
        duty: float,
        kv_bytes: tuple[float, float],
        weight_bytes: int,
    ) -> SharingModel:
        """One shard of the model on ``id``. ``kv_bytes``: while it decodes, and over time."""
        spec = model.spec
        rates = rates_on(spec, self._fleet.devices[id].spec.kind)
        step_s, share = step_of(rates, spec.shard_weight_bytes + int(kv_bytes[0]), 1)
        bearable = spec.slo_tpot_s / (self.corrections.factor(id, spec.name) * step_s)
        return SharingModel(spec.name, rate_per_s, duty, share, bearable, kv_bytes[1], weight_bytes)

    def _duty_at(self, model: ModelRecord, rate_per_s: float) -> float:
        """Part of the time in which a model decodes at least with so many requests per second."""
        tokens = self._answers.get(model.name)
        if tokens is None:
            return _duty_at(rate_per_s)
        step_s = alone_s(rates_on(model.spec, DeviceKind.CUDA), Batch(model.spec.shard_weight_bytes, 0, 1))
        return -math.expm1(-rate_per_s * tokens * step_s)

    def take_report(self, report: DeviceReport, now_s: float) -> None:
        """The device (which is in the fleet) reported: its load, and what answers that ended lately say of its speed.
        With tensor parallelism the lead device's answers say it."""
        device = self._fleet.devices[report.device]
        running = [i for i in device.instances.values() if i.running]
        load = sum([bandwidth_share(self._rates(device, i), _batch(device, i)) for i in running])
        if load or device.load_now or device.load_mean > _NOTHING:
            self._fleet.set_load(report.device, load, now_s)
        self._learn(device, report.instances, now_s)
        if self._by_work:
            self._count_work(device, now_s)

    def _rates(self, device: DeviceRecord, instance: InstanceRecord) -> DeviceRates:
        model = self._models.get(instance.model)  # none: it left the catalog while its requests run
        return GUESSES[device.spec.kind] if model is None else rates_on(model.spec, device.spec.kind)

    def _count_work(self, device: DeviceRecord, now_s: float) -> None:
        """What the device's own instances are expected to take, where it has changed noticeably."""
        id, kind = device.spec.id, device.spec.kind
        for instance in device.instances.values():
            if instance.state is not InstanceState.READY or instance.queue_device != id:
                continue
            if instance.settled_s != now_s:
                self._settle(instance, now_s)
            kv_bytes, running, model = instance.kv_mean_bytes, instance.running, self._models[instance.model]
            if running:
                kv_bytes = max(kv_bytes, float(device.busy_kv.get(instance.key, 0)))
            # By the rate alone: what the catalog expects was not seen yet.
            duty = max(instance.duty, _duty_at(model.weighted_rate * model.spec.slo_ttft_s / len(model.instances)))
            read_bytes = instance.shards[id].weight_bytes + int(kv_bytes)
            work = duty * step_of(rates_on(model.spec, kind), read_bytes, running or 1)[1]
            if _differs(work, instance.work) or _differs(kv_bytes, instance.kv_work_bytes):
                self._fleet.set_work(instance, work, kv_bytes)
            model.duty, model.kv_mean_bytes = instance.duty, kv_bytes

    def _learn(self, device: DeviceRecord, loads: tuple[InstanceLoad, ...], now_s: float) -> None:
        for one in loads:
            if one.token_s <= 0.0:
                continue
            instance = device.instances.get(one.key)
            if instance is not None and instance.running:
                said_s = self.token_s(device, instance, now_s)
                self.corrections.observe(device.spec.id, one.key.model, said_s, one.token_s)

    def token_s(self, device: DeviceRecord, instance: InstanceRecord, now_s: float) -> float:
        """Seconds that a token of the instance takes on ``device`` as busy as it is."""
        factor = self.corrections.factor(device.spec.id, instance.model)
        crowd = slowdown(self._fleet.load_of(device.spec.id, now_s))
        return factor * alone_s(self._rates(device, instance), _batch(device, instance)) * crowd

    def crowd_with(self, id: DeviceId, instance: InstanceRecord, now_s: float) -> float:
        """How many times longer than alone steps take on ``id`` with ``instance`` there as well, loaded as it is."""
        return slowdown(self._fleet.load_of(id, now_s) + self.share_of(id, instance))

    def share_of(self, id: DeviceId, instance: InstanceRecord) -> float:
        """Share of the bandwidth of ``id`` that the instance would take there with what it runs now."""
        here = self._fleet.devices[instance.queue_device]
        return bandwidth_share(self._rates(self._fleet.devices[id], instance), _batch(here, instance))

    def room_of(self, instance: InstanceRecord, token_s: float) -> float:
        """How many requests like those that it runs now the instance could run, alone on its device, with tokens in
        ``token_s`` at most; 0 when none could."""
        device = self._fleet.devices[instance.queue_device]
        kv_bytes = device.busy_kv.get(instance.key, 0) / max(1, instance.running)
        weight_bytes = instance.shards[instance.queue_device].weight_bytes
        factor = self.corrections.factor(device.spec.id, instance.model)
        return room_within(self._rates(device, instance), weight_bytes, kv_bytes, token_s / factor)

    def bearable_slowdown(self, id: DeviceId) -> float:
        """How much slower than alone engines may be on ``id`` while every one with requests there makes tokens within
        its objective; infinite where nobody has any. Whoever misses it alone does not count."""
        device = self._fleet.devices[id]
        most = float("inf")
        for instance in device.instances.values():
            if instance.running:
                factor = self.corrections.factor(id, instance.model)
                objective_s = self._models[instance.model].spec.slo_tpot_s
                times = objective_s / (factor * alone_s(self._rates(device, instance), _batch(device, instance)))
                most = min(most, times if times >= 1.0 else float("inf"))
        return most

    def is_slow(self, id: DeviceId, now_s: float) -> bool:
        """Whether engines on ``id`` slow each other down so much that somebody's tokens come too slowly."""
        load = self._fleet.load_of(id, now_s)
        return load > 1.0 and load > self.bearable_slowdown(id)


def _batch(device: DeviceRecord, instance: InstanceRecord) -> Batch:
    shard = instance.shards.get(device.spec.id)
    weight_bytes = 0 if shard is None else shard.weight_bytes
    return Batch(weight_bytes, max(0, device.busy_kv.get(instance.key, 0)), instance.running)


def _differs(value: float, known: float) -> bool:
    return abs(value - known) > 0.02 * max(value, known)


def _duty_at(rate_per_s: float) -> float:
    """Share of the time in which a model runs at least with so many requests per second."""
    return -math.expm1(-rate_per_s * _ANSWER_S)
