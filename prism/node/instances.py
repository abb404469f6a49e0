"""Models on this node's devices: carries out the controller's commands, one at a time per model.

An instance is ``(model, generation)``. A command is answered exactly once per sending: a repeated command (the
controller did not hear the answer) is answered again with the same result and not carried out again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from prism.core.events import ActivationError as Cause
from prism.core.events import EngineUp
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.specs import ModelSpec
from prism.engine.api import Handle, Pool
from prism.engine.errors import ActivationCause, ActivationError
from prism.node.device import DeviceShell
from prism.node.measures import NodeMeasures
from prism.node.weights import NodeWeights, Prepared
from prism.scheduler import keepalive
from prism.transfer.errors import TransferError
from prism.weights.errors import WeightsError
from prism.wire.messages import Activate, CommandResult, Deactivate, InstanceReport, Stillborn

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S: Final = 30.0
"""How long running requests may take to finish on an instance that leaves; then they are carried over."""
REMEMBERED_RESULTS: Final = 1_000
REMEMBERED_STILLBORN: Final = 16

_CAUSES: Final[Mapping[ActivationCause, Cause]] = {
    ActivationCause.MISSING: Cause.WEIGHTS_MISSING,
    ActivationCause.CORRUPT: Cause.WEIGHTS_CORRUPT,
    ActivationCause.UNSUPPORTED: Cause.UNSUPPORTED,
    ActivationCause.TOO_LARGE: Cause.NO_MEMORY,
    ActivationCause.OUT_OF_MEMORY: Cause.NO_MEMORY,
    ActivationCause.TIMEOUT: Cause.TIMEOUT,
    ActivationCause.ENGINE_DIED: Cause.ENGINE_DIED,
    ActivationCause.INTERNAL: Cause.ENGINE_DIED,
}
"""What the scheduler needs to know of why an activation failed."""


@dataclass(slots=True)
class Instance:
    """One model on its devices. Changed by :class:`Instances` only."""

    spec: ModelSpec
    generation: Generation
    devices: tuple[DeviceId, ...]
    state: str
    """``activating``, ``active`` or ``draining``."""
    handle: Handle | None = None
    watcher: asyncio.Task[None] | None = None
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Its activation ended, well or badly."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """It leaves, and what still runs is to be carried over now."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> InstanceKey:
        return InstanceKey(self.spec.name, self.generation)


class Instances:
    """All instances of the node. ``changed`` is called whenever one comes, goes or changes state."""

    def __init__(
        self,
        pool: Pool,
        shells: Mapping[DeviceId, DeviceShell],
        changed: Callable[[], None],
        measures: NodeMeasures,
        weights: NodeWeights | None = None,
    ) -> None:
        """``weights`` brings what is not on this machine; None: there are no other machines."""
        self._pool, self._shells, self._changed, self._measures = pool, shells, changed, measures
        self._weights = weights
        self._by_model: dict[ModelName, dict[Generation, Instance]] = {}
        self._running_commands: dict[str, asyncio.Task[CommandResult]] = {}
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self.stillborn: deque[Stillborn] = deque(maxlen=REMEMBERED_STILLBORN)
        """For the controller: engines that died by themselves before any request had a token of them."""

    def all(self) -> Iterable[Instance]:
        return [instance for group in self._by_model.values() for instance in group.values()]

    async def command(self, message: Activate | Deactivate) -> CommandResult:
        """Carries the command out, or returns what came of it when it was heard before."""
        if message.command in self._results:
            return self._results[message.command]
        task = self._running_commands.get(message.command)
        if task is None:
            work = self._activate(message) if isinstance(message, Activate) else self._deactivate(message)
            task = self._running_commands[message.command] = asyncio.create_task(work)
        try:
            result = await asyncio.shield(task)
        finally:
            if task.done():  # a command that broke is carried out again when it is repeated
                self._running_commands.pop(message.command, None)
        self._results[message.command] = result
        if len(self._results) > REMEMBERED_RESULTS:
            self._results.popitem(last=False)
        return result

    def close(self) -> None:
        """Ends everything under way: the agent stops, and with it its engines."""
        watchers = [instance.watcher for instance in self.all() if instance.watcher is not None]
        for task in [*self._running_commands.values(), *watchers]:
            task.cancel()

    def reports(self) -> list[InstanceReport]:
        """Every instance with its numbers, for the controller and for operators."""
        return [self._report(instance) for instance in self.all()]

    def due_in_s(self) -> float:
        """Seconds until the controller has to hear of a model that may have reached its keep-alive."""
        active = [x for x in self.all() if x.state == "active" and x.spec.keep_alive_s is not None]
        return keepalive.due_in_s((self._idle_s(x), x.spec.keep_alive_s) for x in active)

    def idle_bytes(self, device: DeviceId) -> int:
        """Prefix caches on ``device``, which engines give back when somebody needs the memory."""
        return sum(_idle_bytes(x) for x in self.all() if device in x.devices)

    # --- activation ---

    async def _activate(self, message: Activate) -> CommandResult:
        model, generation = ModelName(message.model), Generation(message.generation)
        devices = tuple(DeviceId(d) for d in message.devices)
        unknown = [d for d in devices if d not in self._shells]
        if unknown:
            return _failed(message.command, Cause.STALE, f"no such device here: {', '.join(unknown)}")
        group = self._by_model.setdefault(model, {})
        if generation in group or any(set(x.devices) & set(devices) for x in group.values()):
            return _failed(message.command, Cause.STALE, f"{model} is already on {', '.join(devices)}")
        instance = group[generation] = Instance(message.spec, generation, devices, "activating")
        self._changed()
        started_s = time.monotonic()
        try:
            at_hand = await self._prepare(message)
            spec = replace(message.spec, path=at_hand.folder)
            handle = await self._pool.activate(spec, devices, kv_limit_bytes=message.kv_cap_bytes, mark=at_hand.mark)
        except Exception as error:
            self._remove(instance)
            self._measures.activation(model, devices, "none", {}, "failed")
            if isinstance(error, WeightsError | TransferError):
                log.warning("%s: %s", model, error)
                return _failed(message.command, Cause.WEIGHTS_MISSING, str(error))
            if not isinstance(error, ActivationError):
                log.exception("activation of %s broke", model)
                return _failed(message.command, Cause.ENGINE_DIED, f"{type(error).__name__}: {error}")
            log.warning("%s", error)
            return _failed(message.command, _CAUSES[error.cause], error.detail)
        finally:
            instance.loaded.set()
        seconds = time.monotonic() - started_s
        log.info("%s is active on %s after %.3f s (%s)", model, ", ".join(devices), seconds, message.reason)
        phases = {**handle.phases, "total": seconds}
        self._measures.activation(model, devices, "remote" if at_hand.remote else handle.source, phases, "ok")
        self._serve(instance, handle, elastic=message.kv_cap_bytes is None)
        return CommandResult(command=message.command, ok=True, phases=phases)

    async def _prepare(self, message: Activate) -> Prepared:
        if self._weights is None:
            return Prepared(message.spec.path)
        return await self._weights.prepare(message)

    def _serve(self, instance: Instance, handle: Handle, *, elastic: bool) -> None:
        spec, shell = instance.spec, self._shells[instance.devices[0]]
        instance.handle, instance.state = handle, "active"
        up = EngineUp(
            key=instance.key,
            prefill_tokens_per_s=handle.prefill_tokens_per_s,
            kv_bytes_per_token=-(-spec.shape.kv_bytes_per_token // spec.tp),
            max_running=handle.max_running,
            chunk_tokens=handle.chunk_tokens,
            max_request_tokens=handle.max_request_tokens,
            elastic=elastic,
            kv_page_bytes=shell.page_bytes,
        )
        shell.engine_up(handle, up)
        instance.watcher = asyncio.create_task(self._watch(instance, handle, shell))
        self._changed()

    async def _watch(self, instance: Instance, handle: Handle, shell: DeviceShell) -> None:
        died = await shell.consume(instance.key, handle)
        if died is not None:
            model = instance.spec.name
            log.error("the engine of %s on %s died: %s", model, ", ".join(instance.devices), died.reason)
            self._measures.engine_died(instance.devices)
            if died.suspects and not shell.counts(instance.key).served:
                self.stillborn.append(Stillborn(model=model, generation=instance.generation, reason=died.reason))
            shell.engine_down(instance.key)
            self._remove(instance)

    # --- deactivation ---

    async def _deactivate(self, message: Deactivate) -> CommandResult:
        """A second command for the same instance may ask to carry over what the first one lets finish; both are
        answered when the instance is gone. One that is still loading leaves as soon as it is loaded."""
        model = ModelName(message.model)
        instance = self._by_model.get(model, {}).get(Generation(message.generation))
        if instance is not None:
            if message.carry:
                instance.hurry.set()
            await instance.loaded.wait()
            if instance.state == "active":
                await self._leave(instance)
            await instance.gone.wait()
        return CommandResult(command=message.command, ok=True)

    async def _leave(self, instance: Instance) -> None:
        model, shell = instance.spec.name, self._shells[instance.devices[0]]
        assert instance.handle is not None  # it is active
        instance.state = "draining"
        self._changed()
        shell.stop_admitting(instance.key)
        await shell.drained(instance.key, instance.hurry, DRAIN_TIMEOUT_S)
        carried = await instance.handle.deactivate(grace_s=0.0)
        if instance.watcher is not None:
            await instance.watcher
        shell.engine_down(instance.key)
        self._remove(instance)
        log.info("%s left %s, %d requests carried over", model, ", ".join(instance.devices), len(carried))

    def _remove(self, instance: Instance) -> None:
        group = self._by_model.get(instance.spec.name, {})
        group.pop(instance.generation, None)
        if not group:
            self._by_model.pop(instance.spec.name, None)
        instance.gone.set()
        self._changed()

    def _report(self, instance: Instance) -> InstanceReport:
        model, load = instance.spec.name, instance.handle.load if instance.handle else None
        counts = self._shells[instance.devices[0]].counts(instance.key)
        ranks = len(instance.devices)
        return InstanceReport(
            model=model,
            generation=instance.generation,
            devices=list(instance.devices),
            state=instance.state,
            weight_bytes=load.weight_bytes // ranks if load else instance.spec.shard_weight_bytes,
            kv_bytes=load.kv_mapped_bytes // ranks if load else 0,
            kv_idle_bytes=_idle_bytes(instance),
            running=counts.running,
            waiting=counts.waiting,
            served=counts.served,
            idle_s=self._idle_s(instance) if instance.state == "active" else 0.0,
        )

    def _idle_s(self, instance: Instance) -> float:
        return self._shells[instance.devices[0]].idle_s(instance.spec.name)


def _idle_bytes(instance: Instance) -> int:
    """On each of its devices."""
    load = instance.handle.load if instance.handle else None
    if load is None:
        return 0
    return load.cached_kv_tokens * -(-instance.spec.shape.kv_bytes_per_token // len(instance.devices))


def _failed(command: str, cause: Cause, detail: str) -> CommandResult:
    return CommandResult(command=command, ok=False, error=cause.value, detail={"detail": detail})
