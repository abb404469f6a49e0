"""Reading the cluster scheduler: a frozen view of what it knows, and what it would do now and why (``prism plan``).

Nothing here changes the scheduler's state, so that looking does not change what is decided.
"""

from __future__ import annotations

from prism.core.ids import DeviceId
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.views import ClusterView, DeviceView, InstanceView, ModelView, PlannedDecision
from prism.scheduler.books import Books
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.decisions import Room
from prism.scheduler.rates import rate_shares
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.survey import Survey


def view(scheduler: ClusterScheduler, now_s: float) -> ClusterView:
    """Devices and every model that is loaded, wanted, pinned or failed, with rates as of now. Costs nothing per idle
    model without these."""
    books = scheduler.books
    models = sorted(scheduler.models_of_interest(), key=lambda m: m.name)
    return ClusterView(
        now_s,
        books.settings.policy.value,
        _device_views(books, now_s),
        tuple(_model_view(books, model, now_s) for model in models),
    )


def _device_views(books: Books, now_s: float) -> tuple[DeviceView, ...]:
    fleet, rates = books.fleet, _rates_of_devices(books, now_s)
    return tuple(
        DeviceView(
            id=id,
            node=device.spec.node,
            domain=device.spec.domain,
            capacity_bytes=device.spec.memory_bytes,
            free_bytes=device.spec.memory_bytes if device.free_bytes is None else device.free_bytes,
            draining=device.draining,
            weight_bytes=int(device.spec.memory_bytes - fleet.board.shared[fleet.index[id]]),
            weighted_rate=rates[id],
        )
        for id, device in fleet.devices.items()
    )


def _rates_of_devices(books: Books, now_s: float) -> dict[DeviceId, float]:
    """What the board would have if all rates were brought up to now."""
    found = dict.fromkeys(books.fleet.devices, 0.0)
    for model in books.loaded_models():
        for instance, rate in rate_shares(model, books.rates.weighted_rate(model, now_s)):
            for part in instance.parts:
                for id in part.devices:
                    found[id] += rate / len(part.devices)
    return found


def _model_view(books: Books, model: ModelRecord, now_s: float) -> ModelView:
    spec = model.spec
    return ModelView(
        name=model.name,
        rate_per_s=model.rate.per_s(now_s),
        slo_ttft_s=spec.slo_ttft_s,
        weight_bytes=spec.weight_bytes,
        min_kv_bytes=spec.min_kv_bytes,
        tp=spec.tp,
        pinned=model.pinned,
        waiting=model.waiting,
        oldest_wait_s=max(0.0, now_s - model.waiting_since_s) if model.waiting else 0.0,
        activation_s=books.activation_s(model),
        instances=tuple(_instance_view(i) for i in model.instances),
        failure=model.failure,
        retry_at_s=model.retry_at_s if model.retry_at_s > now_s else None,
    )


def _instance_view(instance: InstanceRecord) -> InstanceView:
    return InstanceView(
        generation=instance.key.generation,
        parts=instance.parts,
        state=instance.state,
        running=instance.running,
        waiting=instance.waiting,
        kv_bytes=instance.kv_bytes,
        since_s=instance.since_s,
        idle_since_s=instance.idle_since_s,
    )


def plan(scheduler: ClusterScheduler, now_s: float) -> list[PlannedDecision]:
    """What the scheduler would do for every loaded or wanted model if it decided now, most urgent first."""
    decisions: list[PlannedDecision] = []
    survey = Survey()
    for model in scheduler.models_of_interest():
        if not model.coming_or_here and (model.waiting or model.want is not None):
            decisions += _activation(scheduler, model, now_s, survey)
    return [*decisions, *scheduler.policy.explain_loaded(now_s)]


def _activation(scheduler: ClusterScheduler, model: ModelRecord, now_s: float, survey: Survey) -> list[PlannedDecision]:
    if model.retry_at_s > now_s or model.failed_for_good:
        reason = because(ReasonCode.ACTIVATION_FAILED, failures=model.failures, error=model.failure)
        return [PlannedDecision(model.name, "wait" if not model.failed_for_good else "refuse", (), (), reason)]
    if not scheduler.books.fleet.devices:
        return [PlannedDecision(model.name, "wait", (), (), because(ReasonCode.NO_DEVICES))]
    answer = scheduler.policy.find_room(model, now_s, survey)
    if not isinstance(answer, Room):
        action = "wait" if answer.refuse is None else "refuse"
        reason = answer.refuse or answer.waits or because(ReasonCode.NO_ROOM, waiting=model.waiting)
        return [PlannedDecision(model.name, action, (), (), reason)]
    evicted = [PlannedDecision(v.model, "evict", v.devices, (), why) for v, why in answer.evict]
    reason = model.want or because(ReasonCode.DEMAND, waiting=model.waiting)
    reason = Reason(reason.code, reason.numbers + answer.numbers)
    return [*evicted, PlannedDecision(model.name, "activate", (), answer.devices, reason)]
