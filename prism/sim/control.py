"""The controller's shell: gives events to the production cluster scheduler and carries out what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prism.core.effects import Activate, ClusterEffect, Deactivate, RefuseWaiting, Route
from prism.core.events import ClusterEvent, Tick
from prism.scheduler.cluster import ClusterScheduler

if TYPE_CHECKING:
    from prism.sim.world import World


class Control:
    """Commands reach the node agents after the command time, routes the front doors at once."""

    def __init__(self, world: World, scheduler: ClusterScheduler) -> None:
        self._world = world
        self.scheduler = scheduler
        self._wake = world.queue.alarm(self._tick)

    def tell(self, event: ClusterEvent) -> None:
        """Give ``event`` to the scheduler and do what it wants."""
        effects = self.scheduler.on_event(event, self._world.queue.now_s)
        for effect in list(effects):
            self._do(effect)
        wake_s = self.scheduler.wake_s
        if wake_s is None:
            self._wake.clear()
        else:
            self._wake.set(wake_s)

    def _tick(self, _: object) -> None:
        self.tell(Tick())

    def _do(self, effect: ClusterEffect) -> None:
        world = self._world
        world.recorder.decided(effect, world.queue.now_s)
        if isinstance(effect, Activate):
            self._command(world.nodes.activate, effect)
        elif isinstance(effect, Deactivate):
            self._command(world.nodes.deactivate, effect)
        elif isinstance(effect, Route):
            world.front.route(effect.model, effect.devices)
        else:
            assert isinstance(effect, RefuseWaiting)
            world.front.refuse(effect)

    def _command(self, to: Any, effect: Activate | Deactivate) -> None:
        self._world.queue.after(self._world.cluster.timing.command, to, effect)
