"""``serverlessllm``: an autoscaler over devices of one model each (ServerlessLLM, OSDI 2024), as a rival.

Weights of all models stand in host memory; an instance is loaded when its model is asked, and has its devices to
itself. A model should have one instance for every ``concurrency_target`` of its requests, waiting ones included (the
authors' autoscaler); they are started at once, each on a free seat, or on one whose model has nothing to do: of these
first a model with more instances than it should have, then the one idle longest (an instance is kept alive until
somebody needs its place, which is never worse than giving it back after a time). Nobody in use is driven out. Left out:
its locality (all nodes have all weights here) and live migration, which serves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from prism.core.events import DeviceReport
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.policy.virtual_queue import QueueSeat
from prism.scheduler.decisions import Decision, StartInstance
from prism.scheduler.records import ModelRecord
from prism.scheduler.seats import SeatPolicy


class ServerlessPolicy(SeatPolicy):
    """See the module."""

    def choose(self, seats: list[QueueSeat], model: ModelRecord, now_s: float) -> QueueSeat | None:
        """A free seat, else that of a model without requests."""
        empty = [s for s in seats if not s.models]
        if empty:
            return min(empty, key=lambda s: s.devices)
        idle = [s for s in seats if s.may_leave and not s.busy and model.name not in s.models]
        return min(idle, key=lambda s: (self._is_needed(s), self._idle_since_s(s), s.devices), default=None)

    def on_report(self, report: DeviceReport, now_s: float) -> Iterator[Decision]:
        """Further instances for the models that the device has, as many as their requests ask for."""
        for name in dict.fromkeys(load.key.model for load in report.instances):
            model = self.books.models.get(name)
            if model is not None and not model.removed and now_s >= model.retry_at_s:
                yield from self._scale_out(model, now_s)

    def _scale_out(self, model: ModelRecord, now_s: float) -> Iterator[Decision]:
        have, wanted = _instances(model), self._wanted(model)
        for instances in range(have, wanted):
            seat = self.choose(self._seats.for_model(model), model, now_s)
            if seat is None:
                return
            counts = {"instances": instances, "wanted": wanted, "waiting": _requests(model)}
            room = self._seats.room_on(seat.devices, model, now_s)
            yield StartInstance(model, room, because(ReasonCode.SCALE_OUT, **counts))

    def _wanted(self, model: ModelRecord) -> int:
        settings = self.books.settings
        return min(settings.max_replicas, math.ceil(_requests(model) / settings.concurrency_target))

    def _idle_since_s(self, seat: QueueSeat) -> float:
        return max(i.idle_since_s or 0.0 for i in self._seats.there(seat.devices))

    def _is_needed(self, seat: QueueSeat) -> bool:
        """Some model there has no more instances than it should have."""
        models = [self.books.models[name] for name in seat.models]
        return any(_instances(m) <= max(1, self._wanted(m)) for m in models)


def _instances(model: ModelRecord) -> int:
    """Those that serve or will."""
    return sum(i.state is not InstanceState.DRAINING for i in model.instances)


def _requests(model: ModelRecord) -> int:
    return model.waiting + sum(i.running + i.waiting for i in model.instances)
