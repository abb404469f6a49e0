"""The controller's main loop: events in, effects out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import Final

import msgspec

from prism.controller.admin import Admin
from prism.controller.dealing import Dealing
from prism.controller.distribution import Supplies, WeightDistribution
from prism.controller.gauges import Gauges
from prism.controller.health import CatalogHealth
from prism.controller.inactive import InactiveQueue, Refusal
from prism.controller.joint import Conclusion
from prism.controller.kv_follow import KvFollow
from prism.controller.lease import ControllerLease
from prism.controller.models import KnownModels
from prism.controller.nodes import FleetNodes
from prism.controller.orders import Orders
from prism.controller.parameter_pool import FleetPool
from prism.controller.placement import PlacementBook
from prism.controller.pool_keeper import PoolKeeper
from prism.controller.rescue import Rescue
from prism.controller.takeover import fleet_heard
from prism.controller.transfers import Transfers
from prism.controller.versions import Versions
from prism.controller.wishes import OperatorWishes
from prism.core.effects import Activate, ClusterEffect, Deactivate, RefuseWaiting, Route, ShareWaiting
from prism.core.errors import PrismError
from prism.core.events import (
    ActivationFailed,
    ActivationFinished,
    Arrivals,
    ClusterEvent,
    DeactivationFinished,
    FleetKnown,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    NodeLost,
    OperatorDrain,
    PinChanged,
    Tick,
)
from prism.core.ids import ModelName, node_of
from prism.core.settings import PolicyName
from prism.obs import names
from prism.obs.decisions import DecisionLog
from prism.obs.metrics import Metrics
from prism.policy.multicast.topology import NetworkTopology
from prism.scheduler.cluster import ClusterScheduler
from prism.store.interface import Store, consumer_name
from prism.store.ledger import Ledger
from prism.store.values import FRONT_DEAD, StoreUnavailable
from prism.wire import keys
from prism.wire.commands import ShareQueue
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.messages import AgentReport, Cancel, CommandResult
from prism.wire.refusals import refusal_of

log = logging.getLogger(__name__)

READ_COUNT: Final = 256
TICK_S: Final = 0.1
WATCH_S: Final = 1.0
"""How often the catalog's file, silent nodes and dead front doors are looked at."""
SHOW_SHARE: Final = 10.0
"""Pause between two views that were written because a model came or went, in times of what writing one took."""
FRONT_DEAD_S: Final = 60.0
"""See :data:`prism.node.fronts.DEAD_AFTER_S`."""
FIXED_MAPS: Final = (PolicyName.STATIC, PolicyName.MUXSERVE)
SETTLE_S: Final = 0.05
SETTLE_MAX_S: Final = 1.0


class Controller:
    """Build it, then :meth:`run` until cancelled; it waits for the lease first. ``topology``: what the catalog says of
    the fleet's network."""

    def __init__(
        self,
        models: KnownModels,
        scheduler: ClusterScheduler,
        store: Store,
        inbox: Inbox,
        decisions: DecisionLog,
        metrics: Metrics,
        topology: NetworkTopology | None = None,
    ) -> None:
        self.models, self.scheduler, self.store, self.inbox = models, scheduler, store, inbox
        self.consumer = consumer_name("controller")
        self.outbox = Outbox(keys=inbox.keys)
        self.ledger = Ledger(store, self.consumer)
        self.inactive = InactiveQueue(self.ledger, self.outbox)
        self.nodes = FleetNodes()
        self.orders = Orders(self.outbox, inbox.address, self.nodes)
        self.placement = PlacementBook(store)
        self.admin = Admin(self)
        self.kv = KvFollow(models, self.placement, self.nodes, self.outbox.send)
        self.rescue = Rescue(store, self.consumer)
        self.distribution = WeightDistribution(self.nodes, topology)
        self.dealing = Dealing(self.inactive, self.placement, self.feed)
        self.transfers = Transfers(metrics)
        self.lease = ControllerLease(store, self.consumer, inbox.address)
        self.wishes = OperatorWishes(store)
        self.pool = PoolKeeper(models, FleetPool(self.nodes, metrics), store, self.outbox)
        self.gauges = Gauges(scheduler, store, metrics)
        self.health = CatalogHealth()
        self.versions = Versions()
        self._decisions, self._metrics = decisions, metrics
        self._lines: list[str] = []
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Serves until cancelled or until the lease is lost to another controller
        (:class:`prism.store.values.LeaseLost`)."""
        await self.lease.take()
        await self._introduce_all()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lease.hold())
                await self.wishes.read()  # before the first report: its devices may be drained
                group.create_task(self._mail())
                group.create_task(self._clock())
                await fleet_heard(self.store, self.nodes)
                self.feed(FleetKnown())
                self.kv.fleet_known()
                group.create_task(self._waiting())
                group.create_task(self.admin.serve(self.consumer))
                group.create_task(self.placement.publish(lambda: self.lease.holder))
                group.create_task(self._watch())
                group.create_task(self._show())
                group.create_task(self._wished())
                group.create_task(self.health.watch(lambda: self.models.catalog))
        finally:
            self.outbox.close()
            await self.lease.give_back()

    # --- events ---

    def feed(self, event: ClusterEvent) -> list[ClusterEffect]:
        """One event into the scheduler, its effects out; returns them for the caller's answer."""
        now_s = time.time()
        self.placement.note(event, now_s)
        with self._metrics.timed(names.DECISION_SECONDS, scheduler="cluster"):
            effects = self.scheduler.on_event(event, now_s)
        supplies = self._supplies([e for e in effects if isinstance(e, Activate)], now_s)
        for effect in effects:
            self._carry_out(effect, now_s, supplies)
        return effects

    def _supplies(self, orders: list[Activate], now_s: float) -> Supplies:
        """Where the weights of these activations come from; those that send them are told."""
        if not orders:
            return {}
        images = {order.model: self.models.images(order.model) for order in orders}
        before = {sent.session for sent in self.distribution.running()}
        supplies, sends = self.distribution.supply(orders, images, now_s)
        late = {key for key, by_node in supplies.items() if not all(s.company.leads for s in by_node.values())}
        self.dealing.ordered(orders, late)
        for sent in self.distribution.running():
            if sent.session not in before:
                log.info("weights of %s are sent", sent.model, extra={"decision": sent.as_decision().as_dict()})
        for mailbox, message in sends:
            self.outbox.send(mailbox, message)
        return supplies

    async def _mail(self) -> None:
        async for message in self.inbox:
            match message:
                case AgentReport():
                    await self._reported(message)
                case CommandResult():
                    for event in self.orders.answer(message, time.time()):
                        self._answered(event)
                case Cancel(id=request_id):
                    if (state := self.inactive.cancel(request_id)) is not None:
                        self.feed(state)
                case _:
                    log.warning("unexpected message %s", type(message).__name__)

    async def _reported(self, report: AgentReport) -> None:
        if not self.versions.agree(report):
            return
        self.transfers.on_report(report)
        for model, count in report.arrivals.items():  # they came before the state that the report shows
            if await self._introduce(ModelName(model)):
                self.feed(Arrivals(ModelName(model), count))
        served = {model for model in sorted(self.nodes.fresh_in(report)) if await self._introduce(model)}
        for event in self.nodes.report(report, time.time()):  # no pause: nothing is decided on half of a report
            self._take_reported(event, report.mailbox, served)
        self.kv.reported(report)

    def _take_reported(self, event: ClusterEvent, mailbox: str, served: set[ModelName]) -> None:
        """One event of a report from ``mailbox``; ``served``: of the models of its fresh instances those that the
        catalog has."""

        def is_news(found: InstanceFound) -> bool:
            return found.key.model in served and not self.placement.expects(found)

        match event:
            case NodeLost(node):
                self.orders.node_lost(node, time.time())
            case NodeJoined():
                self.outbox.broken(mailbox)  # watched from now on
                drains = self.wishes.drains(spec.id for spec in event.devices)
                event = replace(event, found=tuple(f for f in event.found if is_news(f)), drains=tuple(drains))
            case InstanceFound() if not is_news(event):
                return
            case OperatorDrain(devices, on=False):  # mended; an operator wants some of them empty all the same
                held = {d for drain in self.wishes.drains(devices) for d in drain.devices}
                event = replace(event, devices=tuple(d for d in devices if d not in held))
            case InstanceLost() if self.placement.expects(event):
                return  # its command's answer is on the way and says the same
            case _:
                pass
        self.feed(event)

    def _answered(self, event: ClusterEvent) -> None:
        match event:
            case ActivationFinished() | ActivationFailed() | DeactivationFinished():
                if isinstance(event, ActivationFinished):
                    self.nodes.answered(event.key, self.placement.parts_of(event.key))
                if isinstance(event, DeactivationFinished):
                    self.kv.left(event.key)
                self.feed(event)
                self.admin.concluded(event)
                self._moved.set()
            case _:
                self.feed(event)

    async def _waiting(self) -> None:
        """Reads the inactive queue, first what a dead controller held."""
        entries = []
        while True:
            try:
                entries = await self.store.take_over(keys.INACTIVE_QUEUE, self.consumer, idle_s=0.0)
                if not entries:
                    entries = await self.store.read_new([keys.INACTIVE_QUEUE], self.consumer, READ_COUNT, 1.0)
            except StoreUnavailable as error:
                log.warning("cannot read the inactive queue: %s", error)
                await asyncio.sleep(0.2)
                continue
            counted: dict[ModelName, tuple[int, int]] = {}
            for entry in entries:
                try:
                    submission = entry.submission
                except (msgspec.ValidationError, msgspec.DecodeError) as error:
                    log.error("dropped an unreadable entry %s: %s", entry.entry_id, error)
                    self.ledger.done(entry)
                    continue
                if not self.inactive.holds(submission.id):
                    self.inactive.add(entry, submission)
                    model = ModelName(submission.model)
                    fresh, hops = counted.get(model, (0, 0))
                    counted[model] = (fresh + (submission.hops == 0), max(hops, submission.hops))
            for model, (fresh, hops) in counted.items():
                asyncio.get_running_loop().create_task(self._arrived(model, fresh, hops))

    async def _arrived(self, model: ModelName, fresh: int, hops: int) -> None:
        """``fresh`` of the model's new requests come from a front door, the others were sent back by a device."""
        if not await self._introduce(model):
            return
        if fresh:
            self.feed(Arrivals(model, fresh))
        if hops and self.placement.route_of(model):
            # The device that sent it back knows something that its report will say in a moment.
            await asyncio.sleep(min(SETTLE_MAX_S, SETTLE_S * hops))
        if routed := self.placement.route_of(model):
            self.dealing.pass_on(model, routed)  # a front door had an old placement
        else:
            self.feed(self.inactive.state(model))

    async def _introduce(self, model: ModelName) -> bool:
        """Makes sure that the scheduler knows ``model``; if it cannot be read, its waiting requests are refused."""
        try:
            event = await self.models.introduce(model)
        except PrismError as error:
            log.error("%s cannot be served: %s", model, error)
            refusal = Refusal(503, "model_unavailable", f"{model} cannot be served: {error}", None)
            self.inactive.refuse(model, refusal)
            return False
        if event is not None:
            self.feed(self.wishes.applied(event))
        return True

    async def _wished(self) -> None:
        """Pinned models are loaded at the start, and as many instances as operators asked an earlier controller for."""
        catalog = self.models.catalog
        pins = self.wishes.pins(ModelName(config.name) for config in catalog.models if config.pinned)
        for name, pinned in pins.items():
            if name in catalog.by_name and await self._introduce(name):
                self.feed(PinChanged(name, pinned))
        for load in self.wishes.loads():
            if load.model in catalog.by_name and await self._introduce(load.model):
                self.feed(load)

    async def _introduce_all(self) -> None:
        """Policies with one fixed map over the catalog must know all of it before the first device."""
        if self.scheduler.settings.policy in FIXED_MAPS:
            self.feed(await self.models.introduce_all())

    # --- effects ---

    def _carry_out(self, effect: ClusterEffect, now_s: float, supplies: Supplies) -> None:
        self._lines.append(self._decisions.committed(effect, now_s))
        match effect:
            case Activate() | Deactivate():
                self.placement.ordered(effect, now_s)
                for event in self._order(effect, now_s, supplies):
                    asyncio.get_running_loop().call_soon(self._answered, event)
            case Route(model=model, devices=devices):
                self.placement.route(model, devices, now_s)
                if devices:
                    self.dealing.pass_on(model, devices)
            case RefuseWaiting():
                self._refuse(effect)
            case ShareWaiting(key, device, kept_share):
                if (mailbox := self.nodes.mailbox_of(node_of(device))) is not None:
                    self.outbox.send(mailbox, ShareQueue(key=key, device=device, kept_share=kept_share))

    def _order(self, effect: Activate | Deactivate, now_s: float, supplies: Supplies) -> list[Conclusion]:
        if isinstance(effect, Deactivate):
            return self.orders.deactivate(effect, now_s)
        spec = self.models.known(effect.model)
        if spec is None:
            raise ValueError(f"{effect.model} is activated, and nobody has introduced it")
        return self.orders.activate(effect, spec, supplies.get(effect.key, {}), now_s)

    def _refuse(self, effect: RefuseWaiting) -> None:
        told = refusal_of(effect.model, effect.reason, effect.detail)
        refusal = Refusal(told.status, told.code, told.message, effect.retry_after_s)
        self.inactive.refuse(effect.model, refusal, arrived_before_s=effect.arrived_before_s, keep=effect.keep)
        self.dealing.tell_waiting(effect.model)

    # --- time ---

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.time()
            self.orders.repeat(now_s)
            wake_s = self.scheduler.wake_s
            if wake_s is not None and wake_s <= now_s:
                self.feed(Tick())
            await self._publish_decisions()

    async def _publish_decisions(self) -> None:
        lines, self._lines = self._lines, []
        try:
            for line in lines:
                await self.store.append_decision(line)
        except StoreUnavailable as error:
            log.warning("%d decisions were logged to the file only: %s", len(lines), error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for event in self.nodes.silent(time.time(), self.outbox.broken):
                log.error("a node is lost: %s", event)
                if isinstance(event, NodeLost):
                    self.orders.node_lost(event.node, time.time())
                self.feed(event)
            for key, nodes in self.nodes.strays(time.time()):
                log.warning("what is left of %s on %s leaves: its other parts are gone", key, ", ".join(nodes))
                self.orders.withdraw(key, nodes, time.time())
            await self.pool.look()
            if self.models.file_changed():
                with contextlib.suppress(PrismError):  # logged there; the old catalog stays
                    await self.admin.reload()
            try:
                await self.admin.publish()
                await self.gauges.look()
                await self._drop_dead_fronts()
                await self.rescue.look(self.nodes, self.versions, time.monotonic())
            except StoreUnavailable as error:
                log.warning("the store is away: %s", error)

    async def _show(self) -> None:
        """Operators see what came and went at once; the view is written every second anyway."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            began_s = time.monotonic()
            with contextlib.suppress(StoreUnavailable):
                await self.admin.publish()
            await asyncio.sleep(SHOW_SHARE * (time.monotonic() - began_s))

    async def _drop_dead_fronts(self) -> None:
        seen_s = await self.store.fronts()
        now_s = time.time()
        for submission in list(self.inactive.submissions()):
            seen = seen_s.get(submission.front)
            if seen == FRONT_DEAD or now_s - max(seen or 0.0, submission.arrival_s) > FRONT_DEAD_S:
                log.info("dropping %s, its front door is gone", submission.id)
                if (state := self.inactive.cancel(submission.id)) is not None:
                    self.feed(state)
