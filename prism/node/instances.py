"""Instances on this node's devices: carries out the controller's commands. Two generations of a model may stand on one
device: the one that came up last gets what arrives, the other one finishes what it has.

A command is answered exactly once per sending: a repeated command (the controller did not hear the answer) is answered
again with the same result and not carried out again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from prism.core.device_events import EngineUp
from prism.core.events import ActivationError
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey, parts_by_node
from prism.core.specs import Scheduling
from prism.core.views import InstanceState
from prism.engine.api import Engines, Handle
from prism.engine.errors import ActivationCause, CannotActivate
from prism.node.device import DeviceShell
from prism.node.layers_network import LayersNetwork
from prism.node.live_pairs import LivePairs
from prism.node.local_instance import LiveBeginning, LocalInstance
from prism.node.measures import NodeMeasures
from prism.node.weights import NodeWeights, PreparedWeights
from prism.policy.profiles import prefill_on, step_rates
from prism.scheduler import keepalive
from prism.scheduler.instance_life import DRAIN_S, InstanceStep, Steps
from prism.transfer.errors import TransferError
from prism.weights.errors import WeightsError
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.messages import CommandResult
from prism.wire.reports import EngineDeath, InstanceReport, Stillborn

log = logging.getLogger(__name__)

CLOCKS_DIFFER_S: Final = 0.01
"""A timer of the loop may ring so much before the time that it was set to."""
REMEMBERED_RESULTS: Final = 1_000
REMEMBERED_STILLBORN: Final = 16

_CAUSES: Final[Mapping[ActivationCause, ActivationError]] = {
    ActivationCause.MISSING: ActivationError.WEIGHTS_MISSING,
    ActivationCause.CORRUPT: ActivationError.WEIGHTS_CORRUPT,
    ActivationCause.UNSUPPORTED: ActivationError.UNSUPPORTED,
    ActivationCause.TOO_LARGE: ActivationError.NO_MEMORY,
    ActivationCause.OUT_OF_MEMORY: ActivationError.NO_MEMORY,
    ActivationCause.TIMEOUT: ActivationError.TIMEOUT,
    ActivationCause.ENGINE_DIED: ActivationError.ENGINE_DIED,
    ActivationCause.INTERNAL: ActivationError.ENGINE_DIED,
}
"""What the scheduler needs to know of why an activation failed."""


class Instances:
    """All instances of the node. ``changed`` is called whenever one comes, goes or changes state."""

    def __init__(
        self,
        node: NodeId,
        pool: Engines,
        shells: Mapping[DeviceId, DeviceShell],
        changed: Callable[[], None],
        measures: NodeMeasures,
        weights: NodeWeights | None = None,
        borrowed_bytes: Callable[[ModelName], int] | None = None,
        layers_dir: Path | None = None,
    ) -> None:
        """``weights`` brings what is not on this machine; None: there are no other machines. ``borrowed_bytes`` tells
        what a model has of other devices' memory. ``layers_dir`` takes the sockets of engines that run layers for
        others; None: none does."""
        self._node, self._pool, self._shells, self._changed, self._measures = node, pool, shells, changed, measures
        self._weights, self._borrowed_bytes = weights, borrowed_bytes or (lambda model: 0)
        network = None if weights is None else LayersNetwork(weights.server)
        self._live = LivePairs(layers_dir, self.all, measures, changed, network)
        if weights is not None:
            weights.awaited = self._awaits_weights
        self._instances: dict[InstanceKey, LocalInstance] = {}
        self._running_commands: dict[str, asyncio.Task[CommandResult]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self.stillborn: deque[Stillborn] = deque(maxlen=REMEMBERED_STILLBORN)
        self.deaths: dict[ModelName, EngineDeath] = {}
        """The latest of each model."""
        """For the controller: engines that died by themselves before any request had a token of them."""

    def start(self) -> None:
        """The agent runs: other machines may ask for what its engines can do for theirs."""
        self._live.offer()

    def all(self) -> Iterable[LocalInstance]:
        return list(self._instances.values())

    def _awaits_weights(self, model: str) -> bool:
        """Whether an instance of the model begins here, or others run what it lacks."""
        handles = [one.handle for one in self.all() if one.key.model == model]
        loads = [None if handle is None else handle.load for handle in handles]
        return None in handles or any(load and load.remote and not load.remote.alone for load in loads)

    async def command(self, message: ActivateCommand | DeactivateCommand) -> CommandResult:
        """Carries the command out, or returns what came of it when it was heard before."""
        if message.command in self._results:
            return self._results[message.command]
        task = self._running_commands.get(message.command)
        if task is None:
            work = self._activate(message) if isinstance(message, ActivateCommand) else self._deactivate(message)
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

    def forget_adapter(self, model: ModelName, adapter: str) -> None:
        """All engines of ``model`` let go of a LoRA adapter that no request of theirs needs."""
        for instance in self.all():
            if instance.key.model == model and instance.handle is not None:
                instance.handle.forget_adapter(adapter)

    def close(self) -> None:
        """Ends everything under way: the agent stops, and with it its engines."""
        watchers = [instance.watcher for instance in self.all() if instance.watcher is not None]
        for task in [*self._running_commands.values(), *self._endings, *watchers]:
            task.cancel()
        self._live.close()

    def reports(self) -> list[InstanceReport]:
        """Every instance with its numbers, for the controller and for operators."""
        return [self._report(instance) for instance in self.all()]

    def due_in_s(self) -> float:
        """Seconds until the controller has to hear of a model that may have reached its keep-alive."""
        active = [x for x in self.all() if x.state is InstanceState.READY and x.spec.keep_alive_s is not None]
        return keepalive.due_in_s((self._idle_s(x), x.spec.keep_alive_s) for x in active)

    def idle_bytes(self, device: DeviceId) -> int:
        """On ``device`` what engines give back when somebody needs the memory."""
        return sum(_idle_bytes(x) for x in self.all() if device in x.part.devices)

    # --- activation ---

    async def _activate(self, message: ActivateCommand) -> CommandResult:
        refusal = self._refusal(message)
        if refusal is not None:
            return _failed(message.command, *refusal)
        (part,) = parts_by_node(message.parts)[self._node]
        others = {node: address for node, address in message.peers.items() if node != self._node}
        instance = LocalInstance(
            message.key,
            message.spec,
            part,
            message.parts,
            elastic=message.kv_cap_bytes is None,
            addresses=others,
            begins=LiveBeginning.ordered(message),
        )
        self._instances[message.key] = instance
        self._changed()
        try:
            return await self._load(instance, message)
        except Exception as error:
            self._remove(instance)
            self._measures.activation(message.key.model, part.devices, "none", {}, "failed")
            return _failed(message.command, *_why(error, message.key))

    def _refusal(self, message: ActivateCommand) -> tuple[ActivationError, str] | None:
        """Why the command cannot be carried out here, whatever the engine can do."""
        here = parts_by_node(message.parts).get(self._node, ())
        if len(here) != 1:
            return ActivationError.UNSUPPORTED, f"{len(here)} parts of one instance on {self._node}; there can be one"
        devices = here[0].devices
        if unknown := [d for d in devices if d not in self._shells]:
            return ActivationError.STALE, f"no such device here: {', '.join(unknown)}"
        if message.key in self._instances:
            return ActivationError.STALE, f"{message.key} is already on {', '.join(devices)}"
        return None

    async def _load(self, instance: LocalInstance, message: ActivateCommand) -> CommandResult:
        model, devices = instance.key.model, instance.part.devices
        at_hand = await self._prepare(message)
        handle = await self._pool.activate(
            instance.key,
            replace(message.spec, path=at_hand.folder),
            instance.part,
            kv_limit_bytes=message.kv_cap_bytes,
            mark=at_hand.mark,
            first_pieces=await self._live.first_pieces(instance),
            turn=(message.turn, message.turns),
        )
        instance.handle = handle  # others may lead over it before it leads itself
        early = await self._live.lead(instance, handle)
        seconds = time.monotonic() - instance.ordered_s
        log.info("%s is ready on %s after %.3f s (%s)", instance.key, ", ".join(devices), seconds, message.reason)
        if handle.helped_bytes:
            log.info("%s: of its weights came over other devices: %s", instance.key, dict(handle.helped_bytes))
        phases = {**handle.phases, "total": seconds}
        self._measures.activation(model, devices, "remote" if at_hand.remote else handle.source, phases, "ok")
        self._measures.helped(model, handle.helped_bytes)
        self._follow(instance, instance.life.loaded(time.monotonic()))
        return CommandResult(
            command=message.command, ok=True, phases=phases, early=early, whole_only=instance.whole_only
        )

    async def _prepare(self, message: ActivateCommand) -> PreparedWeights:
        if self._weights is None:
            return PreparedWeights(message.spec.path)
        return await self._weights.prepare(message)

    def _serve(self, instance: LocalInstance) -> None:
        handle, shell = instance.handle, self._shells[instance.part.lead]
        assert handle is not None  # it is loaded
        if instance.takes_requests:
            shell.engine_up(handle, _engine_up(instance, handle, shell))
        instance.watcher = asyncio.create_task(self._watch(instance, handle))
        self._changed()

    async def _watch(self, instance: LocalInstance, handle: Handle) -> None:
        shell = self._shells[instance.part.lead]
        died = await shell.consume(instance.key, handle)
        if died is not None:
            log.error("the engine of %s on %s died: %s", instance.key, ", ".join(instance.part.devices), died.reason)
            self._measures.engine_died(instance.part.devices)
            self.deaths[instance.key.model] = EngineDeath(key=instance.key, reason=died.reason, at_s=time.time())
            if died.suspects and not shell.counts(instance.key).served:
                self.stillborn.append(Stillborn(key=instance.key, reason=died.reason))
            instance.life.lost()  # first: that it runs nothing any more is no end of a drain
            shell.engine_down(instance.key)
            self._remove(instance)

    # --- deactivation ---

    async def _deactivate(self, message: DeactivateCommand) -> CommandResult:
        """A second command for the same instance may ask to carry over what the first one lets finish; both are
        answered when the instance is gone. One that is still loading leaves as soon as it is loaded."""
        instance = self._instances.get(message.key)
        if instance is not None:
            running = self._shells[instance.part.lead].running(instance.key)
            self._follow(instance, instance.life.leave(message.carry, running, time.monotonic()))
            await instance.gone.wait()
        return CommandResult(command=message.command, ok=True)

    def note_emptied(self, key: InstanceKey) -> None:
        """The instance runs no request any more."""
        if (instance := self._instances.get(key)) is not None:
            self._follow(instance, instance.life.emptied())

    def _note_time(self, instance: LocalInstance) -> None:
        log.info("%s still runs requests after %.0f s, carrying them over", instance.key, DRAIN_S)
        self._follow(instance, instance.life.pass_time(time.monotonic()))

    def _stop_admitting(self, instance: LocalInstance) -> None:
        late_s = instance.life.drained_by_s - time.monotonic()
        if late_s < float("inf"):
            loop = asyncio.get_running_loop()
            instance.drained_by = loop.call_later(late_s + CLOCKS_DIFFER_S, self._note_time, instance)
        self._changed()
        self._shells[instance.part.lead].stop_admitting(instance.key)

    async def _end(self, instance: LocalInstance) -> None:
        shell = self._shells[instance.part.lead]
        assert instance.handle is not None  # it serves
        carried = await instance.handle.deactivate(grace_s=0.0)
        if instance.watcher is not None:
            await instance.watcher
        shell.engine_down(instance.key)
        self._remove(instance)
        log.info("%s left %s, %d requests carried over", instance.key, ", ".join(instance.part.devices), len(carried))

    # --- an instance's life ---

    def _follow(self, instance: LocalInstance, steps: Steps) -> None:
        """Does what the instance's life wants next."""
        for step in steps:
            match step:
                case InstanceStep.SERVE:
                    self._serve(instance)
                case InstanceStep.STOP_ADMITTING:
                    self._stop_admitting(instance)
                case InstanceStep.END:
                    ending = asyncio.create_task(self._end(instance))
                    self._endings.add(ending)
                    ending.add_done_callback(self._endings.discard)

    def _remove(self, instance: LocalInstance) -> None:
        instance.life.lost()
        if instance.drained_by is not None:
            instance.drained_by.cancel()
        self._instances.pop(instance.key, None)
        instance.gone.set()
        self._changed()

    # --- reports ---

    def _report(self, instance: LocalInstance) -> InstanceReport:
        load = instance.handle.load if instance.handle else None
        shell = self._shells[instance.part.lead]
        counts, times = shell.counts(instance.key), shell.times(instance.key)
        ranks = len(instance.part.devices)
        return InstanceReport(
            key=instance.key,
            parts=instance.parts,
            state=instance.state,
            weight_bytes=load.weight_bytes // ranks if load else instance.spec.shard_weight_bytes,
            kv_bytes=load.kv_mapped_bytes // ranks if load else 0,
            kv_idle_bytes=_idle_bytes(instance),
            borrowed_bytes=self._borrowed_bytes(instance.key.model),
            long_host_bytes=load.long_host_bytes if load else 0,
            long_lent_bytes=load.long_lent_bytes if load else 0,
            running=counts.running,
            waiting=counts.waiting,
            served=counts.served,
            idle_s=self._idle_s(instance) if instance.state is InstanceState.READY else 0.0,
            waited_s=times.waited_s,
            token_s=times.token_s,
            adapters=load.adapters if load else [],
            remote=self._live.report(instance),
        )

    def _idle_s(self, instance: LocalInstance) -> float:
        return self._shells[instance.part.lead].idle_s(instance.key.model)


def _engine_up(instance: LocalInstance, handle: Handle, shell: DeviceShell) -> EngineUp:
    return EngineUp(
        key=instance.key,
        prefill_tokens_per_s=prefill_on(instance.spec, shell.kind, handle.prefill_tokens_per_s),
        kv_bytes_per_token=instance.spec.shape.kv_bytes_per_rank(instance.spec.tp),
        max_running=handle.max_running,
        chunk_tokens=handle.chunk_tokens,
        max_request_tokens=handle.max_request_tokens,
        device_tokens=handle.device_tokens,
        no_long=handle.no_long,
        elastic=instance.elastic,
        kv_page_bytes=shell.page_bytes,
        fair=instance.spec.scheduling is Scheduling.FAIR,
        weight_bytes=instance.spec.shard_weight_bytes,
        slo_tpot_s=instance.spec.slo_tpot_s,
        prefer=instance.spec.prefer,
        rates=step_rates(instance.spec, shell.kind, shell.pace),
        stands_still=instance.spec.tp == 1 and not handle.device_tokens,
    )


def _idle_bytes(instance: LocalInstance) -> int:
    """On each of its devices: its prefix cache, and the window of a request that is larger than them."""
    load = instance.handle.load if instance.handle else None
    if load is None:
        return 0
    return (load.cached_kv_tokens + load.long_window_tokens) * instance.spec.shape.kv_bytes_per_rank(instance.spec.tp)


def _why(error: Exception, key: InstanceKey) -> tuple[ActivationError, str]:
    """What the scheduler is told of a failed activation."""
    if isinstance(error, CannotActivate):
        log.warning("%s", error)
        return _CAUSES[error.cause], error.detail
    if isinstance(error, WeightsError | TransferError):
        log.warning("%s: %s", key, error)
        return ActivationError.WEIGHTS_MISSING, str(error)
    log.error("activation of %s broke", key, exc_info=error)
    return ActivationError.ENGINE_DIED, f"{type(error).__name__}: {error}"


def _failed(command: str, error: ActivationError, detail: str) -> CommandResult:
    return CommandResult(command=command, ok=False, error=error.value, detail={"detail": detail})
