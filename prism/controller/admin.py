"""Operators' commands: read from their stream, fed to the scheduler as events, answered when they took effect."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prism.config.errors import CatalogError
from prism.config.sections.model import ModelConfig
from prism.controller.takeover import fleet_heard
from prism.core.effects import Activate, RefuseWaiting, decision_record
from prism.core.errors import PrismError
from prism.core.events import (
    ActivationFailed,
    ActivationFinished,
    DeactivationFinished,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
)
from prism.core.ids import DeviceId, ModelName, local_name
from prism.core.instances import InstanceKey
from prism.core.views import InstanceState
from prism.scheduler import planning
from prism.store.values import Entry, StoreUnavailable
from prism.wire import keys
from prism.wire.commands import AdminCommand, ForgetAdapter
from prism.wire.messages import CommandResult

if TYPE_CHECKING:
    from prism.controller.controller import Controller

log = logging.getLogger(__name__)

LOOK_S: Final = 0.02
PUBLISH_S: Final = 10.0
"""An answer says what front doors see too; so long it waits for the store to know it."""


class Admin:
    """Serves the command stream of one controller."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._loading: dict[ModelName, list[asyncio.Future[tuple[bool, str]]]] = {}
        self._awaited: dict[InstanceKey, asyncio.Future[tuple[bool, str]]] = {}
        self._applied: dict[str, Any] | None = None
        """The last change of the catalog that was applied: what and when."""

    async def serve(self, consumer: str) -> None:
        """Carries commands out, each in its own task: a load may take minutes."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    entries = await self._c.store.take_over(keys.COMMANDS, consumer, idle_s=0.0)
                    entries += await self._c.store.read_new([keys.COMMANDS], consumer, 16, 1.0)
                except StoreUnavailable:
                    await asyncio.sleep(0.2)
                    continue
                for entry in entries:
                    group.create_task(self._one(entry))

    async def _one(self, entry: Entry) -> None:
        try:
            command = entry.command
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            log.error("dropped an unreadable command: %s", error)
        else:
            result = await self._answer(command)
            self._c.outbox.send(command.reply_to, result)
        self._c.ledger.done(entry)

    async def _answer(self, command: AdminCommand) -> CommandResult:
        if time.time() > command.deadline_s:
            return _error(command, "expired", "nobody waited for it any more")
        try:
            detail = await self._do(command)
            async with asyncio.timeout(PUBLISH_S):
                await self._c.placement.published()
                await self.publish()
            return CommandResult(command=command.command, ok=True, detail=detail)
        except (StoreUnavailable, TimeoutError):
            return _error(command, "store_unavailable", "it was done, but the store does not know it yet")
        except PrismError as error:
            return _error(command, type(error).__name__, str(error))

    async def _do(self, command: AdminCommand) -> dict[str, Any]:
        model, devices = ModelName(command.model), await self._named(command.devices)
        match command.verb:
            case "load":
                if command.instances > 1:
                    return await self._load_many(model, command.instances, command.deadline_s)
                return await self._load(model, devices, command.deadline_s)
            case "unload" if command.adapter:
                return self._forget_adapter(command.model, command.adapter)
            case "unload":
                return await self._unload(OperatorUnload(model, devices, command.carry), command.deadline_s)
            case "pin" | "unpin":
                await self._introduced(model)
                return await self._wish(PinChanged(model, command.verb == "pin"))
            case "drain" | "undrain":
                return await self._wish(OperatorDrain(devices, command.verb == "drain", command.carry))
            case "reload":
                return await self.reload()
            case "plan":
                return self.plan()
            case _:
                raise CommandRefused(f"unknown command {command.verb!r}")

    async def _wish(self, wish: PinChanged | OperatorDrain) -> dict[str, Any]:
        """Carried out, and known to the next controller as well."""
        decided = _decided(self._c.feed(wish))
        await self._c.wishes.hold(wish)
        return decided

    async def _named(self, names: list[str]) -> tuple[DeviceId, ...]:
        """Of a machine that has just come the store knows before its first report is here."""
        known = {name for node in self._c.nodes.all() for d in node.devices for name in (d.id, local_name(d.id))}
        if not known.issuperset(names):
            await self._fleet_heard()
        return self._devices(names)

    async def _fleet_heard(self) -> None:
        rescue = self._c.rescue
        await fleet_heard(self._c.store, self._c.nodes, lambda record: rescue.is_silent(record, time.monotonic()))

    def _devices(self, named: list[str]) -> tuple[DeviceId, ...]:
        """The devices as the scheduler calls them; the machine may be left out where one name means one device."""
        known = [d.id for node in self._c.nodes.all() for d in node.devices]
        found: list[DeviceId] = []
        for name in named:
            fits = [d for d in known if name in (d, local_name(d))]
            if len(fits) != 1:
                what = "no device that is up" if not fits else "more than one device"
                raise CommandRefused(f"{name!r} names {what}; choices: {', '.join(known) or 'none'}")
            found += fits
        if len(set(found)) < len(found):
            raise CommandRefused(f"a device is named twice: {', '.join(found)}")
        return tuple(found)

    # --- load and unload ---

    async def _introduced(self, model: ModelName) -> None:
        event = await self._c.models.introduce(model)
        if event is not None:
            self._c.feed(self._c.wishes.applied(event))

    async def _load(self, model: ModelName, devices: tuple[DeviceId, ...], deadline_s: float) -> dict[str, Any]:
        await self._introduced(model)
        spec = self._c.models.known(model)
        if devices and spec is not None and len(devices) != spec.tp:
            raise CommandRefused(f"{model} needs {spec.tp} devices (tp: {spec.tp}), {len(devices)} were named")
        outcome: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._loading.setdefault(model, []).append(outcome)
        try:
            effects = self._c.feed(OperatorLoad(model, devices))
            sends = self._sends(model)
            refusals = [e for e in effects if isinstance(e, RefuseWaiting)]
            if refusals:
                raise CommandRefused(f"{model} cannot be loaded: {refusals[0].reason} {refusals[0].detail}".strip())
            route = self._c.placement.route_of(model)
            moves = bool(devices) and devices[0] not in route
            if route and moves and not self._comes(model, devices):
                where = f"{', '.join(devices)} is drained, or has no room for it as things are"
                raise CommandRefused(f"{model} stays on {', '.join(route)}: {where}; `prism mem` shows who holds what")
            if route and not moves and not any(isinstance(e, Activate) for e in effects):
                return {"state": "ready", "was_ready": True, **_decided(effects)}
            async with asyncio.timeout(max(0.0, deadline_s - time.time())):
                ok, detail = await outcome
        except TimeoutError as error:
            raise CommandRefused(f"{model} is not loaded yet; it goes on loading, see `prism ps`") from error
        finally:
            self._loading[model].remove(outcome)
        if not ok:
            raise CommandRefused(f"{model} could not be loaded: {detail}")
        return {"state": "ready", "seconds": detail, "sends": sends, **_decided(effects)}

    async def _unload(self, event: OperatorUnload, deadline_s: float) -> dict[str, Any]:
        effects = self._c.feed(event)
        await self._c.wishes.hold(event)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.time())):
                await self._until_left(event.model)
        except TimeoutError as error:
            raise CommandRefused(f"{event.model} still finishes its requests; it leaves when they end") from error
        return _decided(effects)

    def _forget_adapter(self, model: str, adapter: str) -> dict[str, Any]:
        """Engines that still run requests of the adapter keep it; how many were told."""
        told = [node for node in self._c.nodes.all() if any(key.model == model for key in node.instances)]
        for node in told:
            self._c.outbox.send(node.mailbox, ForgetAdapter(model=model, adapter=adapter))
        return {"adapter": adapter, "base": model, "machines": len(told)}

    async def _until_left(self, model: ModelName) -> None:
        """Returns when the instances that leave now have left, whichever way."""
        leaving = {r.generation for r in self._c.placement.replicas(model) if r.state is InstanceState.DRAINING}
        while True:
            leaving &= {r.generation for r in self._c.placement.replicas(model)}
            if not leaving:
                return
            await asyncio.sleep(LOOK_S)

    async def _load_many(self, model: ModelName, instances: int, deadline_s: float) -> dict[str, Any]:
        """As many as there is room for; those that failed are named, none at all is a refusal."""
        await self._introduced(model)
        await self._fleet_heard()  # who starts another machine and asks for its instance means that one
        wish = OperatorLoad(model, (), instances)
        effects = self._c.feed(wish)
        sends = self._sends(model)
        if not any(isinstance(e, Activate) for e in effects) and not self._c.placement.route_of(model):
            await self._c.wishes.hold(wish)
            return await self._load(model, (), deadline_s)  # room for the first must be made
        orders = [e for e in effects if isinstance(e, Activate) and e.model == model]
        loop = asyncio.get_running_loop()
        outcomes = {e.key: loop.create_future() for e in orders}
        self._awaited.update(outcomes)
        try:
            await self._c.wishes.hold(wish)
            async with asyncio.timeout(max(0.0, deadline_s - time.time())):
                results = await asyncio.gather(*outcomes.values())
        except TimeoutError as error:
            raise CommandRefused(f"{model} is not loaded everywhere yet; it goes on, see `prism ps`") from error
        finally:
            for instance in outcomes:
                self._awaited.pop(instance, None)
        failed = [detail for ok, detail in results if not ok]
        here = len(self._c.placement.route_of(model))
        if not here:
            raise CommandRefused(f"{model} could not be loaded: {'; '.join(failed)}")
        counted = {"instances": here, "wanted": instances, "failed": failed}
        return {"state": "ready", **counted, "sends": sends, **_decided(effects)}

    def _comes(self, model: ModelName, devices: tuple[DeviceId, ...]) -> bool:
        """An instance of it loads there, or waits until others have left."""
        coming = (InstanceState.WAITING, InstanceState.LOADING)
        instances = self._c.scheduler.books.models[model].instances
        return any(i.state in coming and i.devices == devices for i in instances)

    def _sends(self, model: ModelName) -> list[dict[str, object]]:
        """How its weights are sent to machines that lack them."""
        return [sent.as_decision().as_dict() for sent in self._c.distribution.running() if sent.model == model]

    def concluded(self, event: ActivationFinished | ActivationFailed | DeactivationFinished) -> None:
        """An instance came up, failed or left: whoever waits for its model hears of it."""
        if isinstance(event, DeactivationFinished):
            return
        ok = isinstance(event, ActivationFinished)
        detail = f"{event.seconds:.3f}" if isinstance(event, ActivationFinished) else f"{event.error}: {event.detail}"
        awaited = self._awaited.get(event.key)
        if awaited is not None and not awaited.done():
            awaited.set_result((ok, detail))
        for outcome in self._loading.get(event.key.model, []):
            if not outcome.done():
                outcome.set_result((ok, detail))

    # --- the rest ---

    async def reload(self) -> dict[str, Any]:
        """Applies the catalog's file. Raises :class:`CommandRefused` when it has errors; then nothing changes."""
        try:
            difference, event = await asyncio.to_thread(self._c.models.reload)
        except CatalogError as error:
            log.error("the catalog was not reloaded: %s", error)
            self._c.gauges.count_reload("invalid")
            raise CommandRefused(str(error)) from error
        log.info("catalog reloaded: %s", difference.summary())
        self._c.health.changed()
        self._c.gauges.count_reload("unchanged" if difference.empty else "applied")
        effects = self._c.feed(event) if event is not None else []
        repinned = [c.new for c in difference.changed if isinstance(c.new, ModelConfig) and "pinned" in c.keys]
        for config in repinned:
            self._c.feed(PinChanged(ModelName(config.name), config.pinned))
        await self._c.wishes.forget(ModelName(config.name) for config in repinned)
        await self._c.store.bump_catalog_generation()
        if not difference.empty:
            self._applied = {"summary": difference.summary(), "at_s": time.time()}
        return {
            "applied_before": self._applied if difference.empty else None,
            "summary": difference.summary(),
            "added": [m.name for m in difference.added],
            "removed": [m.name for m in difference.removed],
            "changed": [c.new.name for c in difference.changed],
            "needs_restart": list(difference.needs_restart),
            **_decided(effects),
        }

    def plan(self) -> dict[str, Any]:
        """What the scheduler would do now, and why; and which weights are being sent, and how."""
        now_s = time.time()
        decisions = planning.plan(self._c.scheduler, now_s)
        decisions += [sent.as_decision() for sent in self._c.distribution.running()]
        lines = [decision.as_dict() for decision in decisions]
        return {"at_s": now_s, "policy": self._c.scheduler.settings.policy.value, "decisions": lines}

    async def publish(self) -> None:
        """Writes the view to the store, where front doors read it. Raises :class:`StoreUnavailable`."""
        await self._c.store.put_doc("cluster", json.dumps(self.view()))

    def _held(self) -> dict[str, dict[str, str]]:
        """By model: the machines that have its weights as a whole, in ``memory`` or on ``disk``."""
        names = {mark: model.name for model in self._c.models.catalog.models if (mark := self._mark(model.name))}
        held: dict[str, dict[str, str]] = {}
        for node in self._c.nodes.all():
            for pack in sorted(node.packs, key=lambda p: p.in_memory):
                if pack.model in names:
                    held.setdefault(names[pack.model], {})[node.id] = "memory" if pack.in_memory else "disk"
        return held

    def _deaths(self) -> dict[str, dict[str, Any]]:
        """By model: what its engine said that died last, wherever that was."""
        all_of_them = [(d, node.id) for node in self._c.nodes.all() for d in node.deaths]
        latest = {d.key.model: (d, node) for d, node in sorted(all_of_them, key=lambda known: known[0].at_s)}
        return {model: {"node": node, "at_s": d.at_s, "reason": d.reason} for model, (d, node) in latest.items()}

    def _mark(self, name: str) -> str:
        return self._c.models.mark(ModelName(name))

    def view(self) -> dict[str, Any]:
        """The cluster as the scheduler sees it, with the agents' latest numbers, for operators' views."""
        view = planning.view(self._c.scheduler, time.time()).as_dict()
        view["instances"] = [shown for node in self._c.nodes.all() for shown in node.shown_instances()]
        view["held"] = self._held()
        view["deaths"] = self._deaths()
        view["faults"] = {id: why for node in self._c.nodes.all() for id, why in node.faults.items()}
        view["paces"] = {d.id: d.pace.words for node in self._c.nodes.all() for d in node.devices if d.pace is not None}
        view["arriving"] = [
            {"node": node.id, **msgspec.to_builtins(a)} for node in self._c.nodes.all() for a in node.arriving
        ]
        names = [entry.name for entry in self._c.models.catalog.entries]
        view["broken"] = self._c.health.broken([d for node in self._c.nodes.all() for d in node.devices], names)
        view["inactive"] = {m.name: self._c.inactive.count(ModelName(m.name)) for m in self._c.models.catalog.models}
        return view


class CommandRefused(PrismError):
    """The command was not carried out; the message says why."""


def _decided(effects: list[Any]) -> dict[str, Any]:
    now_s = time.time()
    return {"decisions": [decision_record(effect, now_s) for effect in effects]}


def _error(command: AdminCommand, error: str, detail: str) -> CommandResult:
    return CommandResult(command=command.command, ok=False, error=error, detail={"detail": detail})
