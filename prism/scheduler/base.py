"""The mechanism of cluster scheduling, common to Prism's policy and its rivals.

In layers, each a file: :mod:`.fleet` keeps the books, :mod:`.lifecycle` moves instances through their states,
:mod:`.wanting` tries until a wanted model is loaded or refused, :mod:`.operations` takes in reports, losses, catalog
and operators, and this file hands events out. A policy answers where a wanted model goes (``find_room``), what is done
when time passes (``on_time``), and may react to reports.
"""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.effects import ClusterEffect
from prism.core.events import (
    ActivationFailed,
    ActivationFinished,
    ActivationStarted,
    Arrivals,
    CatalogChanged,
    ClusterEvent,
    DeactivationFinished,
    DeviceLost,
    DeviceReport,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    NodeLost,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
    Tick,
    WaitingRequests,
)
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from prism.scheduler.operations import Operations


class ClusterScheduler(Operations):
    """A state machine; see the module. Subclasses are the policies."""

    def __init__(self, settings: ClusterSettings, catalog: Iterable[ModelSpec], first_generation: int = 1) -> None:
        """``first_generation`` must be larger than any that an earlier scheduler of this fleet has given out."""
        super().__init__(settings, first_generation)
        for spec in catalog:
            self._upsert(spec, 0.0)

    def on_time(self, now_s: float) -> None:
        """Called after every event: periodic work of the policy, when it is due."""

    def next_time_s(self) -> float:
        """When :meth:`on_time` has something to do at the latest."""
        return float("inf")

    @property
    def wake_s(self) -> float | None:
        """Send ``Tick`` at this time at the latest; None: nothing to do before the next event."""
        wake_s = min(self._next_retry_s, self.next_hurry_s, self.next_time_s())
        return wake_s if wake_s < float("inf") else None

    def on_event(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:
        """Take ``event`` in; the effects are to be done in order. ``now_s`` never decreases."""
        self._out = []
        match event:
            case Arrivals():
                self._arrivals(event, now_s)
            case WaitingRequests():
                self._waiting_requests(event, now_s)
            case DeviceReport():
                self._device_report(event, now_s)
            case ActivationFinished():
                self._activation_finished(event, now_s)
            case ActivationFailed(key, error, detail):
                if instance := self.loaded.get(key):
                    self._activation_failed(instance, error, detail, now_s)
            case DeactivationFinished(key):
                if instance := self.loaded.get(key):
                    self.gone(instance, now_s)
            case InstanceLost(key, stillborn):
                if instance := self.loaded.get(key):
                    self._lost(instance, now_s, stillborn)
            case InstanceFound():
                self._instance_found(event, now_s)
            case NodeJoined(_, devices):
                fresh = [d for d in devices if d.id not in self.fleet.devices]
                self.fleet.join(fresh)
                self._retry(now_s)
            case NodeLost(node):
                self._devices_lost([id for id, d in self.fleet.devices.items() if d.spec.node == node], now_s)
            case DeviceLost(device):
                self._devices_lost([device], now_s)
            case CatalogChanged(upserted, removed):
                self._catalog_changed(upserted, removed, now_s)
            case PinChanged(model, pinned):
                self._pin_changed(model, pinned, now_s)
            case OperatorLoad():
                self._operator_load(event, now_s)
            case OperatorUnload():
                self._operator_unload(event, now_s)
            case OperatorDrain():
                self._operator_drain(event, now_s)
            case ActivationStarted() | Tick():
                pass
        if now_s >= self._next_retry_s:
            self._retry(now_s)
        if self.held:
            self._hurry(now_s)
        self.on_time(now_s)
        return self._out
