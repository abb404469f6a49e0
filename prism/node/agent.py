"""The node agent's main loop: mailbox, heartbeat, reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from prism.core.device_events import MemoryReport, WaitingShared
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceSpec
from prism.engine.api import Engines
from prism.kv.host_pool import HostPool
from prism.node.device import DeviceShell
from prism.node.instances import Instances
from prism.node.leaving import Leaving
from prism.node.lending import DeviceLending
from prism.node.live import Live
from prism.node.measures import NodeMeasures
from prism.node.services import NodeServices
from prism.node.weights import NodeWeights
from prism.obs.metrics import Metrics
from prism.store.interface import Store, consumer_name
from prism.store.values import AgentRecord, StoreUnavailable
from prism.wire import keys
from prism.wire.commands import (
    ActivateCommand,
    BringKv,
    DeactivateCommand,
    Distribute,
    ForgetAdapter,
    KeepCopies,
    KvTakers,
    ShareQueue,
)
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.message import PROTOCOL_VERSION
from prism.wire.messages import AgentReport, Cancel, CommandResult, ResumeReply
from prism.wire.reports import DeviceStatus

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
WATCH_S: Final = 1.0
"""Between two looks at what the driver sees of a GPU's memory."""
ARRIVING_S: Final = 0.25
"""Reports while weights arrive, so that they can be watched."""
SETTLE_S: Final = 0.02
"""A burst of changes makes one report."""


SHOWN_REQUESTS: Final = 1_000


class DeviceAccount(Protocol):
    """What is read of a device's memory (:class:`prism.memory.device.Device` has it)."""

    def free_bytes(self) -> int: ...

    def wanted_bytes(self) -> int: ...

    def foreign_bytes(self) -> int: ...

    def outside_bytes(self) -> int: ...


class Watch(Protocol):
    """Keeps a device's account true to what its driver sees (:class:`prism.memory.outside.MemoryWatch`)."""

    def look(self, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class AgentMachine:
    """What an agent looks after."""

    node: NodeId
    devices: tuple[DeviceSpec, ...]
    accounts: Mapping[DeviceId, DeviceAccount]
    """Read all the time."""
    detail: Mapping[str, object] = field(default_factory=dict)
    """Announced in the store with the agent."""
    kept_bytes: int = 0
    """Of each device, for its parked workers: no instance can have it."""
    watches: Mapping[DeviceId, Watch] = field(default_factory=dict)
    """By device; those without one are no GPUs."""
    lending: DeviceLending | None = None
    """None: its devices lend each other nothing."""
    layers_dir: Path | None = None
    """For sockets of engines that run layers for others; None: none does."""
    kv_pool: HostPool | None = None
    """KV in host memory, of which what dead engines had claimed is given back; None: there is none."""


class NodeAgent:
    """One per machine. Build it, then :meth:`run` until cancelled. ``weights`` is there when there are other
    machines."""

    def __init__(
        self,
        machine: AgentMachine,
        settings: GpuSettings,
        pool: Engines,
        store: Store,
        inbox: Inbox,
        metrics: Metrics,
        weights: NodeWeights | None = None,
    ) -> None:
        self.node, self.devices = machine.node, machine.devices
        self.pool, self.store, self.inbox = pool, store, inbox
        self.consumer = consumer_name(f"agent-{self.node}")
        self.incarnation = uuid.uuid4().hex[:12]
        self.outbox = Outbox(keys=inbox.keys)
        self._accounts, self._detail = machine.accounts, machine.detail
        self._kept_bytes, self._watches = machine.kept_bytes, machine.watches
        self._kv_pool = machine.kv_pool
        self._unseen: dict[DeviceId, str] = {}
        """Devices of which the last look failed, and why."""
        self.measures = NodeMeasures(metrics, self.devices)
        self._changed = asyncio.Event() if weights is None else weights.changed
        services = NodeServices(
            store,
            self.outbox,
            inbox.address,
            self.consumer,
            self.measures,
            hasten_report=self._changed.set,
            note_emptied=self._note_emptied,
        )
        self.shells = {d.id: DeviceShell(d, settings, self._memory(d.id), services) for d in self.devices}
        self.weights = weights
        self.lending = machine.lending
        borrowed = None if self.lending is None else self.lending.borrowed_bytes
        changed, layers = self._changed.set, machine.layers_dir
        self.instances = Instances(self.node, pool, self.shells, changed, self.measures, weights, borrowed, layers)
        self._commands: set[asyncio.Task[None]] = set()
        kv = None if weights is None else weights.handover
        self.leaving = Leaving(lambda: bool(self.instances.all()), self._requests, self._changed, kv)

    async def leave(self) -> None:
        """Lets models, requests and KV go to other machines, see :meth:`Leaving.run`. Cancel :meth:`run` afterwards."""
        await self.leaving.run()
        with contextlib.suppress(StoreUnavailable):
            if (controller := await self.store.controller()) is not None:
                self.outbox.send(controller.mailbox, self.report())
            await self.store.remove_agent(self.node)

    def _requests(self) -> int:
        return sum(len(shell.desk.requests) for shell in self.shells.values())

    def _memory(self, device: DeviceId) -> Callable[[], MemoryReport]:
        """Free memory as a scheduler counts it: caches that are given back on demand included."""
        account = self._accounts[device]
        return lambda: MemoryReport(account.free_bytes() + self.instances.idle_bytes(device), account.wanted_bytes())

    def _note_emptied(self, key: InstanceKey) -> None:
        self.instances.note_emptied(key)

    async def run(self) -> None:
        """Serves until cancelled; then engines are closed and what runs is left in the queues for the next agent."""
        await self._look_at_memory()  # a GPU that others fill bears fewer parked workers
        await self.pool.start()
        self.instances.start()
        try:
            async with asyncio.TaskGroup() as group:
                for shell in self.shells.values():
                    group.create_task(shell.run())
                group.create_task(self._mail())
                group.create_task(self._beat())
                group.create_task(self._report())
                if self._watches:
                    group.create_task(self._watch_memory())
                if self.weights is not None:
                    group.create_task(self.weights.run())
        finally:
            if self.weights is not None:
                self.weights.close()
            for task in self._commands:
                task.cancel()
            self.instances.close()
            await self.pool.close()
            self.outbox.close()

    async def _mail(self) -> None:
        async for message in self.inbox:
            match message:
                case ResumeReply():
                    for shell in self.shells.values():
                        shell.desk.fronts.answer(message)
                case Cancel(id=request_id):
                    for shell in self.shells.values():
                        shell.desk.cancel(request_id)
                case Distribute(part=part) if self.weights is not None:
                    self.weights.send_part(part)
                case KeepCopies() if self.weights is not None:
                    self.weights.keep_copies(message)
                case BringKv(model=model, mark=mark, peers=peers) if self.weights is not None:
                    self.weights.bring_kv(model, mark, peers)
                case KvTakers(takers=takers) if self.weights is not None and self.weights.handover is not None:
                    self.weights.handover.told(takers)
                case ForgetAdapter(model=model, adapter=adapter):
                    self.instances.forget_adapter(ModelName(model), adapter)
                case ShareQueue(key=key, device=device, kept_share=kept_share):
                    if DeviceId(device) in self.shells:
                        self.shells[DeviceId(device)].feed(WaitingShared(key, kept_share))
                case ActivateCommand() | DeactivateCommand():
                    task = asyncio.create_task(self._obey(message))
                    self._commands.add(task)
                    task.add_done_callback(self._commands.discard)
                case _:
                    log.warning("unexpected message %s", type(message).__name__)

    async def _obey(self, message: ActivateCommand | DeactivateCommand) -> None:
        try:
            result = await self.instances.command(message)
        except Exception as error:
            log.exception("command %s failed", message.command)
            result = CommandResult(command=message.command, ok=False, error="internal", detail={"detail": str(error)})
        self.outbox.send(message.reply_to, self.report())  # whoever hears the answer has the numbers that go with it
        self.outbox.send(message.reply_to, result)

    async def _beat(self) -> None:
        """Announces the node, keeps its queue entries alive and notices dead front doors."""
        while True:
            try:
                if not self.leaving.done:
                    await self.store.announce_agent(self._record())
                for device, shell in self.shells.items():
                    await self._keep(device, shell)
                await self.store.put_doc(f"node:{self.node}", self._document())
                fronts = await self.store.fronts()
                await self._measure()
            except StoreUnavailable as error:
                log.warning("the store is away: %s", error)
            else:
                for shell in self.shells.values():
                    shell.desk.fronts.refresh(fronts, time.time())
                    shell.desk.drop_dead_fronts(time.time())
            await asyncio.sleep(HEARTBEAT_S)

    async def _keep(self, device: DeviceId, shell: DeviceShell) -> None:
        """Keeps the device's queue entries alive, and lets go of requests whose entries somebody else owns by now:
        this node was taken for dead and they run elsewhere."""
        before = [live.id for live in shell.desk.requests]
        count = await self.store.beat(keys.device_queue(device), self.consumer)
        held = [request_id for request_id in before if request_id in shell.desk.requests]
        if count >= len(held):  # entries that are being acknowledged count too: fewer means that some are another's
            return
        owned = set(await self.store.owned(keys.device_queue(device), self.consumer))
        for request_id in held:
            if request_id not in owned:
                shell.desk.disown(request_id)

    async def _watch_memory(self) -> None:
        """Whatever else uses the GPUs is seen, and what engines take beside their pages."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look_at_memory()

    async def _look_at_memory(self) -> None:
        for device, watch in self._watches.items():
            try:
                await asyncio.to_thread(watch.look, time.monotonic())
                self._unseen.pop(device, None)
            except Exception as error:  # the driver's library has its own tree of errors
                if self._unseen.get(device) != str(error):
                    log.warning("%s: what the driver sees of its memory is not known: %s", device, error)
                self._unseen[device] = str(error)

    async def _measure(self) -> None:
        self.measures.state(self.instances.reports(), self._accounts)
        self.measures.workers(self.pool.counts())
        if self.lending is not None:
            self.measures.lent(self.lending.lent())
        if self._kv_pool is not None:
            await asyncio.to_thread(self._kv_pool.tend)
        self.measures.faults(self.pool.faults())
        lengths = await self.store.lengths([keys.device_queue(d) for d in self.shells])
        for device, length in zip(self.shells, lengths, strict=True):
            self.measures.queue(device, length)

    async def _report(self) -> None:
        """Tells the controller every second, when instances come and go, when a keep-alive ends, and when memory has
        become short: it is decided on what the report says, so that neither its hour nor other machines' clocks
        matter."""
        while True:
            if self.lending is not None:
                self.lending.settle((x.spec, x.part.devices) for x in self.instances.all())
            try:
                controller = await self.store.controller()
            except StoreUnavailable:
                controller = None
            if controller is not None:
                self.leaving.note_controller()
                self.outbox.send(controller.mailbox, self.report())
            with contextlib.suppress(TimeoutError):
                arriving = self.weights is not None and self.weights.busy
                due_s = max(SETTLE_S, self.instances.due_in_s())
                async with asyncio.timeout(min(due_s, ARRIVING_S if arriving else HEARTBEAT_S)):
                    await self._changed.wait()
                    await asyncio.sleep(SETTLE_S)
            self._changed.clear()

    def report(self) -> AgentReport:
        """The node's state for the controller; takes the arrivals counted since the last report."""
        arrivals: dict[str, int] = {}
        for shell in self.shells.values():
            for model, count in shell.desk.arrivals.items():
                arrivals[model] = arrivals.get(model, 0) + count
            shell.desk.arrivals.clear()
        short_s = {id: shell.take_shortage_s() for id, shell in self.shells.items()}
        weights, faults = self.weights, self.pool.faults()
        return AgentReport(
            weights="" if weights is None else weights.server.address,
            packs=[] if weights is None else weights.packs,
            arriving=[] if weights is None else weights.arriving(),
            host_bytes=0 if weights is None else weights.copies.host_bytes,
            disk_bytes_s=0.0 if weights is None else weights.disk_bytes_s,
            link_bytes_s=0.0 if weights is None else weights.link_bytes_s,
            links=[] if weights is None else weights.links(),
            node=self.node,
            protocol=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            mailbox=self.inbox.address,
            devices=[
                DeviceStatus(
                    id=d.id,
                    kind=d.kind.value,
                    domain=d.domain,
                    capacity_bytes=d.memory_bytes - self._accounts[d.id].foreign_bytes() - self._kept_bytes,
                    free_bytes=self._accounts[d.id].free_bytes(),
                    page_bytes=d.page_bytes,
                    weight_page_bytes=d.weight_page_bytes,
                    max_engines=d.max_engines,
                    engine_bytes=d.engine_bytes,
                    memory_short_s=short_s[d.id],
                    fault=faults.get(d.id, ""),
                    pace=d.pace,
                )
                for d in self.devices
            ],
            instances=self.instances.reports(),
            arrivals=arrivals,
            stillborn=list(self.instances.stillborn),
            deaths=list(self.instances.deaths.values()),
            leaving=self.leaving.begun,
            left=self.leaving.done,
            kv_bytes=0 if weights is None else weights.kv_bytes,
            kv_held={} if weights is None or weights.handover is None else weights.handover.held,
            kv_failed={} if weights is None or weights.handover is None else weights.handover.failed,
        )

    def _document(self) -> str:
        """What operators' views show of this node, requests included (the oldest first, bounded)."""
        live = sorted((x for shell in self.shells.values() for x in shell.desk.requests), key=_arrival_s)
        requests = [
            {
                "id": x.id,
                "model": x.model,
                "state": x.shown_stage,
                "device": x.entry.queue.removeprefix(keys.device_queue("")),
                "arrival_s": x.submission.arrival_s,
                "attempt": x.attempt,
                "prompt_tokens": x.submission.prompt_tokens,
            }
            for x in live[:SHOWN_REQUESTS]
        ]
        instances = [report.as_dict(self.node) for report in self.instances.reports()]
        node = {"node": self.node, "pid": os.getpid(), "at_s": time.time(), "instances": instances}
        return msgspec.json.encode({**node, "requests": requests, "requests_total": len(live)}).decode()

    def _record(self) -> AgentRecord:
        return AgentRecord(
            node=self.node,
            mailbox=self.inbox.address,
            devices=[d.id for d in self.devices],
            seen_s=time.time(),
            protocol=PROTOCOL_VERSION,
            pid=os.getpid(),
            detail={"consumer": self.consumer, "incarnation": self.incarnation, **self._detail},
        )


def _arrival_s(live: Live) -> float:
    return live.submission.arrival_s
