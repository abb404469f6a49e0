"""Demand for all models, and the one home of when the board is told of it.

What the board has of a model, ``r / s``, stands from one refresh to the next. It is refreshed at these moments and no
others, live and simulated:

1. when requests for the model arrive (:meth:`DemandRates.on_arrivals`);
2. when the policy's own time has come, before it is asked, for all loaded models: Algorithm 1 compares them as of now
   (:meth:`DemandRates.refresh_loaded`);
3. when the model is started, if the catalog says what is expected: before its first request nothing else does
   (:meth:`DemandRates.on_start`).

Whoever asks in between (a view, a plan, a look for room) computes with :meth:`DemandRates.weighted_rate`, which changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.settings import ClusterSettings
from prism.core.views import InstanceState
from prism.policy.demand import IDLE_GAP_S, ExpectedRates, IdleIntervals
from prism.scheduler.fleet import Fleet
from prism.scheduler.records import InstanceRecord, ModelRecord


class DemandRates:
    """Owns what is expected of models, the idle intervals of all of them, and the rates on the board."""

    def __init__(self, settings: ClusterSettings, fleet: Fleet) -> None:
        self._fleet = fleet
        self._expected = ExpectedRates(dict(settings.expected_rates), settings.rate_window_s)
        self._expects = bool(settings.expected_rates)
        self.pool_idle = IdleIntervals()
        """Idle intervals of all models together."""

    @property
    def expects_still(self) -> bool:
        """No request has come: what the catalog expects is all that is known."""
        return self._expects and not self._expected.begun

    @property
    def knows_anything(self) -> bool:
        """The catalog expects something, or a request has come: until then all models are alike."""
        return self._expects or self._expected.begun

    def weighted_rate(self, model: ModelRecord, now_s: float) -> float:
        """``r / s`` as of now, whatever the board has."""
        rate_per_s = model.rate.per_s(now_s)
        if self._expects:
            rate_per_s += self._expected.per_s(model.spec.name, now_s)
        return rate_per_s / model.spec.slo_ttft_s

    def lately(self, model: ModelRecord, now_s: float) -> float:
        """Requests/s of the last moments, and what is told of the time before."""
        rate_per_s, window_s = model.rate.lately(now_s)
        return rate_per_s + (self._expected.per_s(model.spec.name, now_s, window_s) if self._expects else 0.0)

    def rate_for_room(self, model: ModelRecord, now_s: float) -> float:
        """``r / s`` for which a place is looked for: what the board has of a loaded model, else what it will have after
        :meth:`on_start`."""
        return self.weighted_rate(model, now_s) if self._expects and not model.coming_or_here else model.weighted_rate

    def on_arrivals(self, model: ModelRecord, count: int, now_s: float) -> float:
        """``count`` requests for the model reached the front doors. How long it had been idle; 0: it was not."""
        since_s = model.idle_since_s if model.idle_since_s is not None else model.last_arrival_s
        idle_s = now_s - since_s if since_s is not None else 0.0
        if idle_s > IDLE_GAP_S:
            model.idle.observe(idle_s)
            self.pool_idle.observe(idle_s)
        model.last_arrival_s, model.idle_since_s = now_s, None
        for instance in model.instances:
            self._fleet.mark_busy(instance)
        self._expected.saw_request(now_s)
        model.rate.add(count, now_s)
        model.burst.add(count, now_s)
        self._refresh(model, now_s)
        return idle_s if idle_s > IDLE_GAP_S else 0.0

    def on_start(self, model: ModelRecord, now_s: float) -> None:
        """A further instance of the model stands in the books: it has its part of the rate from now on."""
        if self._expects:
            self._refresh(model, now_s)
        else:
            self.share_out(model)

    def refresh_loaded(self, models: Iterable[ModelRecord], now_s: float) -> None:
        """Rates of loaded models without arrivals decay only by this."""
        for model in models:
            if model.coming_or_here:
                self._refresh(model, now_s)

    def _refresh(self, model: ModelRecord, now_s: float) -> None:
        model.weighted_rate = self.weighted_rate(model, now_s)
        self.share_out(model)

    def share_out(self, model: ModelRecord) -> None:
        """The number or the state of the model's instances changed: divide its rate anew."""
        for instance, rate in rate_shares(model, model.weighted_rate):
            self._fleet.set_rate(instance, rate)


def rate_shares(model: ModelRecord, weighted_rate: float) -> list[tuple[InstanceRecord, float]]:
    """Each instance's part of its model's rate. Instances share evenly; one that replaces another counts with what it
    takes over, one that drains has none."""
    draining, sharers = InstanceState.DRAINING, 0
    for instance in model.instances:
        if instance.replaces is None and instance.state is not draining:
            sharers += 1
    share = weighted_rate / (sharers or 1)
    return [(i, 0.0 if i.state is draining else share) for i in model.instances]
