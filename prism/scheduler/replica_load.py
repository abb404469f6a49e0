"""How many instances a model's load asks for (not in the Prism paper, which gives every model one)."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import ModelName
from prism.core.views import InstanceState
from prism.policy.autoscale import AutoScaler, CapacityEstimate, ScaleBounds
from prism.scheduler.records import InstanceRecord, ModelRecord

_SMOOTH_S = 2.0
"""Time constant of the averages of running and waiting requests."""


@dataclass(slots=True)
class _Record:
    """What is remembered of a model that had requests waiting."""

    scaler: AutoScaler = field(default_factory=lambda: AutoScaler(ScaleBounds()))
    capacity: CapacityEstimate = field(default_factory=CapacityEstimate)
    running: float = 0.0
    waiting: float = 0.0
    at_s: float | None = None
    instances: int = 0
    """Active instances at that time; the averages begin anew when their number changes."""
    waits_since_s: float | None = None
    """Since when requests have been waiting on average."""


class ReplicaLoad:
    """Follows reported loads. Costs nothing for models that never make requests wait."""

    def __init__(self, most: int) -> None:
        """``most``: instances of one model."""
        self._most = most
        self._records: dict[ModelName, _Record] = {}

    def observe(self, model: ModelRecord, now_s: float) -> int:
        """Take in the loads as they are reported; the instances that the model should have now, at least one, at most
        ``most``. Call at every report."""
        active = model.in_state(InstanceState.READY)
        record = self._records.get(model.name)
        if record is None:
            if not any(i.waiting for i in active):
                return len(active)
            record = self._records[model.name] = _Record()
        _smooth(record, active, now_s)
        rate_per_s = model.rate.per_s(now_s)
        load = record.capacity.observe_load(len(active), rate_per_s, record.running, record.waiting)
        return min(self._most, record.scaler.decide_target(now_s, len(active), load))

    def waits_for_s(self, model: ModelName, now_s: float) -> float:
        """How long requests of the model have been waiting without a break."""
        record = self._records.get(model)
        return 0.0 if record is None or record.waits_since_s is None else now_s - record.waits_since_s


def _smooth(record: _Record, active: list[InstanceRecord], now_s: float) -> None:
    running, waiting = sum(i.running for i in active), sum(i.waiting for i in active)
    if record.at_s is None or record.instances != len(active):
        record.running, record.waiting = float(running), 0.0  # one report with waiting requests is no load yet
    else:
        keep = _SMOOTH_S / (_SMOOTH_S + now_s - record.at_s)
        record.running = keep * record.running + (1.0 - keep) * running
        record.waiting = keep * record.waiting + (1.0 - keep) * waiting
    record.at_s, record.instances = now_s, len(active)
    if record.waiting < 0.5:
        record.waits_since_s = None
    elif record.waits_since_s is None:
        record.waits_since_s = now_s
