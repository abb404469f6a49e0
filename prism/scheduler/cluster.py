"""The global scheduler: events in, effects out. It is put together from parts that own their state::

    event -> ClusterScheduler -> Reports, Losses, CatalogEntries, Operators, Drains      take in what happened
                 |                        |
                 |                     Wanting      keeps trying until a wanted model is loaded or refused
                 |                        |  where? -> ClusterPolicy      answers; Prism's or a rival's
                 +- carries out --->   Lifecycle    moves instances through their states
                    its decisions         |
                              Books (models, instances, Fleet, DemandRates)     what is known
                              EffectOutbox                                what is to be done

Everything reads the books; the table in docs/policies.md says who changes what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prism.core.effects import ClusterEffect
from prism.core.events import (
    ActivationFailed,
    ActivationFinished,
    Arrivals,
    CatalogChanged,
    ClusterEvent,
    DeactivationFinished,
    DeviceLost,
    DeviceReport,
    FleetKnown,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    NodeLost,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
    Tick,
    WaitingDealt,
    WaitingRequests,
)
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from prism.scheduler.books import Books
from prism.scheduler.catalog import CatalogEntries
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import Decision, NoRoom, Room, StartInstance, StopInstance, WantModel
from prism.scheduler.drains import Drains
from prism.scheduler.hurry import hurry_drains, next_hurry_s
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.losses import Losses
from prism.scheduler.operators import Operators
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import ModelRecord
from prism.scheduler.reports import take_report
from prism.scheduler.survey import Survey
from prism.scheduler.wanting import Wanting


class ClusterScheduler:
    """A state machine; see the module. ``policy`` decides."""

    def __init__(
        self,
        settings: ClusterSettings,
        catalog: Iterable[ModelSpec],
        make_policy: Callable[[Books], ClusterPolicy],
        first_generation: int = 1,
        takes_over: bool = False,
    ) -> None:
        """``first_generation`` must be larger than any that an earlier scheduler of this fleet has given out.
        ``takes_over``: there may be instances that it does not know yet; nothing is started or moved before
        :class:`FleetKnown`."""
        self.settings = settings
        self.books = books = Books(settings)
        books.fleet_known = not takes_over
        self.policy = policy = make_policy(books)
        self._outbox = EffectOutbox()
        self._lifecycle = lifecycle = Lifecycle(books, self._outbox, first_generation)
        self._wanting = wanting = Wanting(books, lifecycle, policy, self._outbox)
        self._losses = Losses(books, lifecycle, wanting, self._outbox)
        self._catalog = CatalogEntries(books, lifecycle, wanting, self._outbox)
        self._operators = Operators(books, lifecycle, wanting, policy)
        self._drains = Drains(books, lifecycle, wanting, policy)
        for spec in catalog:
            self._catalog.upsert(spec, 0.0)

    # --- questions, which change nothing ---

    @property
    def wake_s(self) -> float | None:
        """Send ``Tick`` at this time at the latest; None: nothing to do before the next event."""
        hurry_s = next_hurry_s(self.books, self._lifecycle)
        wake_s = min(self._wanting.next_retry_s, hurry_s, self.policy.wake_s())
        return wake_s if wake_s < float("inf") else None

    def find_room(self, model: ModelName, now_s: float) -> Room | NoRoom:
        """Where the model, which must be in the catalog, would be activated now."""
        return self.policy.find_room(self.books.models[model], now_s, Survey())

    def models_of_interest(self) -> list[ModelRecord]:
        """Models that are loaded, wanted or failed, most urgent waiting first."""
        return self._wanting.models_of_interest()

    # --- events ---

    def on_event(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:
        """Take ``event`` in; the effects are to be done in order. ``now_s`` never decreases.

        1. What happened goes into the books, and is answered where it asks for an answer.
        2. Memory that came free, or time, lets wanted models be tried again.
        3. Drains that a starving model waits for are hurried.
        4. The policy does what is due.
        """
        self._take_in(event, now_s)  # 1
        if not self.books.fleet_known:
            return self._outbox.take_all()
        if self._lifecycle.freed:
            self.policy.on_gone(self._lifecycle.freed, now_s)
            self._wanting.retry_freed(now_s)  # 2
        if now_s >= self._wanting.next_retry_s:
            self._wanting.retry_wanted(now_s)
        if self._lifecycle.held:
            hurry_drains(self.books, self._lifecycle, now_s)  # 3
        if now_s >= self.policy.next_time_s():
            self.books.rates.refresh_loaded(self.books.loaded_models(), now_s)
        self._carry_out(self.policy.on_time(now_s), now_s)  # 4
        return self._outbox.take_all()

    def _take_in(self, event: ClusterEvent, now_s: float) -> None:
        match event:
            case DeviceReport():
                self._on_report(event, now_s)
            case Arrivals():
                self._on_arrivals(event, now_s)
            case WaitingRequests():
                self._wanting.on_waiting(event, now_s)
            case WaitingDealt(name, settled):
                self._lifecycle.shares.on_dealt(name, settled)
                if settled and (model := self.books.models.get(name)) is not None:
                    self._lifecycle.shares.on_settled(model)
            case OperatorLoad():
                self._operators.on_load(event, now_s)
            case OperatorUnload():
                self._operators.on_unload(event, now_s)
            case OperatorDrain():
                self._drains.on_operator_drain(event, now_s)
            case CatalogChanged():
                self._catalog.on_catalog_changed(event, now_s)
                self._carry_out(self.policy.on_catalog_changed(now_s), now_s)
            case PinChanged(name, pinned):
                self._catalog.on_pin_changed(name, pinned)
            case NodeJoined() | NodeLost() | DeviceLost():
                self._on_devices(event, now_s)
            case FleetKnown():
                self.books.fleet_known = True
                self._wanting.retry_wanted(now_s)
            case Tick():
                pass
            case _:
                self._on_instance(event, now_s)

    def _on_instance(
        self,
        event: ActivationFinished | ActivationFailed | DeactivationFinished | InstanceLost | InstanceFound,
        now_s: float,
    ) -> None:
        """An answer of an instance's owner, or its word on what it has."""
        if isinstance(event, InstanceFound):
            self._losses.on_instance_found(event, now_s)
            return
        instance = self.books.loaded.get(event.key)
        if instance is None:
            return
        match event:
            case ActivationFinished():
                if self._lifecycle.finish_activation(event, now_s) is not None:
                    self._wanting.on_serving(self.books.models[instance.model])
            case ActivationFailed():
                self._wanting.on_activation_failed(instance, event.error, event.detail, now_s)
            case DeactivationFinished():
                self._lifecycle.remove_instance(instance, now_s)
            case InstanceLost():
                self._losses.on_instance_lost(instance, now_s, event.stillborn)

    def _on_devices(self, event: NodeJoined | NodeLost | DeviceLost, now_s: float) -> None:
        fleet = self.books.fleet
        match event:
            case NodeJoined(_, devices, found, drains):
                fleet.add_devices([d for d in devices if d.id not in fleet.devices])
                for instance in found:
                    self._losses.on_instance_found(instance, now_s)
                for drain in drains:
                    self._drains.on_operator_drain(drain, now_s)
                self._wanting.retry_wanted(now_s)
            case NodeLost(node):
                self._losses.on_devices_lost(self._devices_on(node), now_s)
            case DeviceLost(device):
                self._losses.on_devices_lost([device], now_s)

    def _devices_on(self, node: NodeId) -> list[DeviceId]:
        return [id for id, device in self.books.fleet.devices.items() if device.spec.node == node]

    def _on_arrivals(self, event: Arrivals, now_s: float) -> None:
        model = self.books.models.get(event.model)
        if model is not None and not model.removed:
            idle_s = self.books.rates.on_arrivals(model, event.count, now_s)
            self.policy.on_arrivals(model, idle_s, now_s)

    def _on_report(self, report: DeviceReport, now_s: float) -> None:
        if take_report(self.books, report, now_s):
            self._drains.on_report(self.books.fleet.devices[report.device], now_s)
            self._share_waiting(report)
            self._carry_out(self.policy.on_report(report, now_s), now_s)

    def _share_waiting(self, report: DeviceReport) -> None:
        shares = self._lifecycle.shares
        for load in report.instances:
            if not shares.looks_at(load.key):
                continue
            instance = self.books.loaded.get(load.key)
            if instance is not None and instance.queue_device == report.device:
                shares.on_report(self.books.models[instance.model], instance)

    def _carry_out(self, decisions: Iterable[Decision], now_s: float) -> None:
        for decision in decisions:
            match decision:
                case StartInstance():
                    self._lifecycle.start_instance(decision, now_s)
                case StopInstance(instance, reason, carry):
                    self._lifecycle.stop_instance(instance, reason, now_s, carry)
                case WantModel(model, reason):
                    self._wanting.want_because(model, reason, now_s)
