"""Reading the cluster scheduler: a frozen view of what it knows, and what it would do now and why (``prism plan``).

Nothing here changes the scheduler's state.
"""

from __future__ import annotations

from prism.core.instances import whole_model
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.views import ClusterView, DeviceView, InstanceState, InstanceView, ModelView, PlannedDecision
from prism.policy.placement import Assignment
from prism.scheduler.base import ClusterScheduler
from prism.scheduler.cluster import PrismScheduler
from prism.scheduler.fleet import Instance, ModelState
from prism.scheduler.lifecycle import Room


def view(scheduler: ClusterScheduler, now_s: float) -> ClusterView:
    """Devices and every model that is loaded, wanted, pinned or failed. Costs nothing per idle model without these."""
    fleet = scheduler.fleet
    for instance in scheduler.loaded.values():
        scheduler.refresh_rate(scheduler.models[instance.model], now_s)
    shared, rate = fleet.board.shared, fleet.board.rate
    devices = tuple(
        DeviceView(
            id=id,
            node=device.spec.node,
            domain=device.spec.domain,
            capacity_bytes=device.spec.memory_bytes,
            free_bytes=device.spec.memory_bytes if device.free_bytes is None else device.free_bytes,
            draining=device.draining,
            weight_bytes=int(device.spec.memory_bytes - shared[fleet.index[id]]),
            weighted_rate=float(rate[fleet.index[id]]),
        )
        for id, device in fleet.devices.items()
    )
    models = tuple(_model_view(scheduler, m, now_s) for m in sorted(scheduler.of_interest(), key=lambda m: m.name))
    return ClusterView(now_s, scheduler.settings.policy.value, devices, models)


def _model_view(scheduler: ClusterScheduler, model: ModelState, now_s: float) -> ModelView:
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
        activation_s=scheduler.activation_s(model),
        instances=tuple(_instance_view(i) for i in model.instances),
        failure=model.failure,
        retry_at_s=model.retry_at_s if model.retry_at_s > now_s else None,
    )


def _instance_view(instance: Instance) -> InstanceView:
    return InstanceView(
        instance.generation,
        whole_model(instance.devices),
        instance.state,
        instance.running,
        instance.waiting,
        instance.kv_bytes,
        instance.since_s,
        instance.idle_since_s,
    )


def plan(scheduler: ClusterScheduler, now_s: float) -> list[PlannedDecision]:
    """What the scheduler would do for every loaded or wanted model if it decided now, most urgent first."""
    decisions: list[PlannedDecision] = []
    for model in scheduler.of_interest():
        if not model.coming_or_here and (model.waiting or model.want is not None):
            decisions += _activation(scheduler, model, now_s)
    if isinstance(scheduler, PrismScheduler) and scheduler.fleet.devices:
        decisions += [_placement(scheduler, model, a) for model, a in scheduler.assignments(now_s)]
    else:
        decisions += [_kept(instance) for instance in scheduler.loaded.values()]
    return decisions


def _activation(scheduler: ClusterScheduler, model: ModelState, now_s: float) -> list[PlannedDecision]:
    if model.retry_at_s > now_s or model.failed_for_good:
        reason = because(ReasonCode.ACTIVATION_FAILED, failures=model.failures, error=model.failure)
        return [PlannedDecision(model.name, "wait" if not model.failed_for_good else "refuse", (), (), reason)]
    if not scheduler.fleet.devices:
        return [PlannedDecision(model.name, "wait", (), (), because(ReasonCode.NO_DEVICES))]
    answer = scheduler.find_room(model, now_s)
    if not isinstance(answer, Room):
        action = "wait" if answer.refuse is None else "refuse"
        reason = answer.refuse or answer.waits or because(ReasonCode.NO_ROOM, waiting=model.waiting)
        return [PlannedDecision(model.name, action, (), (), reason)]
    evicted = [PlannedDecision(v.model, "evict", v.devices, (), why) for v, why in answer.evict]
    reason = model.want or because(ReasonCode.DEMAND, waiting=model.waiting)
    reason = Reason(reason.code, reason.numbers + answer.numbers)
    return [*evicted, PlannedDecision(model.name, "activate", (), answer.devices, reason)]


def _placement(scheduler: PrismScheduler, model: ModelState, assignment: Assignment) -> PlannedDecision:
    instance = next(i for i in model.instances if i.state is not InstanceState.DRAINING)
    if not assignment.devices:
        reason = because(ReasonCode.NO_ROOM, weight_bytes=model.spec.weight_bytes)
        return PlannedDecision(model.name, "stay", instance.devices, instance.devices, reason)
    pays = assignment.moved and scheduler.move_pays(model, assignment)
    code = ReasonCode.STAY
    if assignment.moved:
        code = ReasonCode.MIGRATION if pays else ReasonCode.MOVE_DOES_NOT_PAY
    reason = because(
        code,
        current_kvpr="infeasible" if assignment.current_kvpr is None else assignment.current_kvpr,
        best_kvpr=assignment.best_kvpr,
        weighted_rate=model.weighted_rate,
        activation_s=scheduler.activation_s(model),
    )
    target = assignment.devices if pays else instance.devices
    return PlannedDecision(model.name, "move" if pays else "stay", instance.devices, target, reason)


def _kept(instance: Instance) -> PlannedDecision:
    return PlannedDecision(instance.model, "stay", instance.devices, instance.devices, instance.reason)
