"""How many instances a model's load asks for, now and at its bursts (not in the Prism paper, which gives every model
one)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.policy.autoscale import AutoScaler, CapacityEstimate, ScaleBounds
from prism.policy.demand import SlidingRate
from prism.policy.replicas import ModelLoad, PeakHold, instances_needed
from prism.scheduler.books import Books
from prism.scheduler.records import BURST_WINDOW_S, InstanceRecord, ModelRecord
from prism.scheduler.shortage import bearable_wait_s

_SMOOTH_S: Final = 2.0
"""Time constant of the averages of running and waiting requests, by which instances leave."""
_LONG_S: Final = 30.0
"""The same of what a request's residence is computed from."""
_PEAKS_S: Final = 600.0
"""Bursts are remembered for so long at least, and twice that at most."""
_CLOSE: Final = 0.8
"""Part of an objective of a token's time from which on a model's load is looked at."""


@dataclass(slots=True)
class _Record:
    """What is remembered of a model whose requests waited, or whose steps came close to their objective."""

    scaler: AutoScaler = field(default_factory=lambda: AutoScaler(ScaleBounds()))
    capacity: CapacityEstimate = field(default_factory=CapacityEstimate)
    served: SlidingRate = field(default_factory=lambda: SlidingRate(BURST_WINDOW_S))
    first_tokens: dict[InstanceKey, int] = field(default_factory=dict)
    needed: int = 1
    """Instances that the load asked for at the last report."""
    peaks: PeakHold = field(default_factory=lambda: PeakHold(_PEAKS_S))
    running: float = 0.0
    waiting: float = 0.0
    long_running: float = 0.0
    long_served_per_s: float = 0.0
    at_s: float | None = None
    instances: int = 0
    """Active instances at that time; the averages begin anew when their number changes."""


class ReplicaLoad:
    """Follows reported loads. Costs next to nothing for models that never need a second instance."""

    def __init__(self, books: Books) -> None:
        self._books, self._most = books, books.settings.max_replicas
        self._records: dict[ModelName, _Record] = {}

    def observe(self, model: ModelRecord, active: list[InstanceRecord], now_s: float) -> int:
        """Take in the loads of its ``active`` instances (one or more) as they are reported; the instances that the
        model should have now, at least one, at most as many as settings allow. Call at every report."""
        record = self._records.get(model.spec.name)
        if record is None:
            for instance in active:
                if instance.busy and self._is_close(model, instance, now_s):
                    break
            else:
                return len(active)
            record = self._records[model.spec.name] = _Record()
        running = waiting = 0
        for instance in active:
            running, waiting = running + instance.running, waiting + instance.waiting
        _smooth(record, active, running, waiting, now_s)
        load = self._load(model, record, active, running, waiting, now_s)
        model.hot = load.hot
        needed = min(self._most, instances_needed(load))
        record.needed = needed
        record.peaks.note(needed, now_s)
        if needed > len(active):
            return needed
        used = record.capacity.observe_load(len(active), load.usual_per_s, record.running, record.waiting)
        enough = record.scaler.decide_target(now_s, len(active), max(used, (needed - 0.5) / len(active)))
        return max(needed, min(enough, len(active)))

    def peak(self, model: ModelName, now_s: float) -> int:
        """The most instances that the model's bursts of the last time have asked for; 1 when there were none."""
        record = self._records.get(model)
        return 1 if record is None else max(1, int(record.peaks.peak(now_s)))

    def needed(self, model: ModelName) -> int:
        """Instances that the model's load asked for when it was reported last, however many it has."""
        record = self._records.get(model)
        return 1 if record is None else record.needed

    def served_per_s(self, model: ModelName, now_s: float) -> float:
        """First tokens of all its instances, of the last moment or, if that is more, on average; 0: not known."""
        record = self._records.get(model)
        return 0.0 if record is None else max(record.served.per_s(now_s), record.long_served_per_s)

    def late(self, model: ModelRecord, now_s: float) -> float:
        """Requests that wait for more than their objective, with as many begun in that time as lately; none if not
        above zero. Those to come do not count: a bursty model's next second is not known. Where it is not known how
        many were begun, it was those that came in the last minute: none waited then."""
        if not model.hot:
            return 0.0
        served_per_s = self.served_per_s(model.name, now_s) or model.rate.per_s(now_s)
        return sum(i.waiting for i in model.instances) - served_per_s * model.spec.slo_ttft_s

    def bursting(self) -> list[ModelName]:
        """Models with a :meth:`peak` to be asked for."""
        return list(self._records)

    def forget_gone(self) -> None:
        """Drop what is remembered of models that the catalog does not have any more."""
        for name in [name for name in self._records if name not in self._books.models]:
            del self._records[name]

    def _is_close(self, model: ModelRecord, instance: InstanceRecord, now_s: float) -> bool:
        """Whether requests wait for the instance, or its steps take nearly as long as they may."""
        if instance.waiting or not instance.running:
            return instance.waiting > 0
        device = self._books.fleet.devices[instance.queue_device]
        return self._books.times.token_s(device, instance, now_s) > _CLOSE * model.spec.slo_tpot_s

    def _load(
        self,
        model: ModelRecord,
        record: _Record,
        active: list[InstanceRecord],
        running: int,
        waiting: int,
        now_s: float,
    ) -> ModelLoad:
        residence_s = record.long_running / record.long_served_per_s if record.long_served_per_s > 0.0 else 0.0
        late = 0
        if waiting:
            bearable_s = bearable_wait_s(model.spec.slo_ttft_s)
            late = sum([i.waiting > 0 and i.waited_s >= bearable_s for i in active])
        hot = 2 * late > len(active)  # most of them: what queued up before the others came is not shared with them
        return ModelLoad(
            instances=len(active),
            running=running,
            waiting=waiting,
            hot=hot,
            arrivals_per_s=model.burst.per_s(now_s),
            served_per_s=record.served.per_s(now_s) if hot else 0.0,  # nothing else asks it
            usual_per_s=model.rate.per_s(now_s),
            residence_s=residence_s,
            room=self._room(model, active) if running else float("inf"),
        )

    def _room(self, model: ModelRecord, active: list[InstanceRecord]) -> float:
        """Of the busiest instance, which runs something, by the time of its steps and by the memory for its KV;
        infinite where no number of instances meets the objective."""
        busiest = active[0] if len(active) == 1 else max(active, key=lambda i: i.running)
        by_time = self._books.times.room_of(busiest, model.spec.slo_tpot_s)
        return min(by_time if by_time >= 1.0 else float("inf"), self._room_in_memory(busiest))

    def _room_in_memory(self, instance: InstanceRecord) -> float:
        """How many requests like those that it runs now have their KV where it is, beside what its neighbours' requests
        may need again; at least as many as it runs."""
        fleet = self._books.fleet
        return min(
            instance.running * (1.0 + max(0.0, fleet.headroom_bytes(id)) / held_bytes)
            if (held_bytes := fleet.devices[id].busy_kv.get(instance.key, 0)) > 0
            else float("inf")
            for id in instance.shards
        )


def _smooth(record: _Record, active: list[InstanceRecord], running: int, waiting: int, now_s: float) -> None:
    served = _count_served(record, active, now_s)
    past_s = 0.0 if record.at_s is None else now_s - record.at_s
    if record.at_s is None or record.instances != len(active):
        record.running, record.waiting = float(running), 0.0  # one report with waiting requests is no load yet
    else:
        keep = _SMOOTH_S / (_SMOOTH_S + past_s)
        record.running = keep * record.running + (1.0 - keep) * running
        record.waiting = keep * record.waiting + (1.0 - keep) * waiting
    if past_s > 0.0:
        keep = _LONG_S / (_LONG_S + past_s)
        record.long_running = keep * record.long_running + (1.0 - keep) * running
        record.long_served_per_s = keep * record.long_served_per_s + (1.0 - keep) * served / past_s
    record.at_s, record.instances = now_s, len(active)


def _count_served(record: _Record, active: list[InstanceRecord], now_s: float) -> int:
    """First tokens since the last look."""
    served, known, seen = 0, record.first_tokens, {}
    for instance in active:
        key, tokens = instance.key, instance.first_tokens
        seen[key] = tokens
        served += max(0, tokens - known.get(key, tokens))
    record.first_tokens = seen
    if served:
        record.served.add(served, now_s)
    return served
