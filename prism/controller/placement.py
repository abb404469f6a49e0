"""Where every model is, as the store tells the front doors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from prism.core.effects import Activate, Deactivate
from prism.core.events import (
    ActivationFailed,
    ActivationFinished,
    ClusterEvent,
    DeactivationFinished,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    NodeLost,
)
from prism.core.ids import DeviceId, Generation, ModelName, node_of
from prism.core.instances import InstanceKey, Parts
from prism.core.views import InstanceState
from prism.store.interface import State
from prism.store.values import ControllerRecord, LeaseLost, Replica, StoreUnavailable

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2


class PlacementBook:
    """Instances and routes, kept in step with the events; :meth:`publish` writes every change to the store."""

    def __init__(self, store: State) -> None:
        self._store = store
        self._replicas: dict[ModelName, dict[Generation, Replica]] = {}
        self._taken_over: set[InstanceKey] = set()
        """Instances that were loading when they were found: no answer will say what becomes of them."""
        self._routes: dict[ModelName, tuple[DeviceId, ...]] = {}
        self._dirty: set[ModelName] = set()
        self._written = asyncio.Event()
        self._written.set()
        self._wake = asyncio.Event()

    def expects(self, event: InstanceFound | InstanceLost) -> bool:
        """Whether the event only says what the answer to an outstanding command will say."""
        replica = self._replicas.get(event.key.model, {}).get(event.key.generation)
        if isinstance(event, InstanceFound):
            return replica is not None and event.key not in self._taken_over
        return replica is not None and replica.state is InstanceState.DRAINING

    def ordered(self, effect: Activate | Deactivate, now_s: float) -> None:
        group = self._replicas.setdefault(effect.model, {})
        state = InstanceState.LOADING if isinstance(effect, Activate) else InstanceState.DRAINING
        if isinstance(effect, Deactivate) and effect.key.generation not in group:
            return
        group[effect.key.generation] = Replica(
            parts=effect.parts,
            state=state,
            generation=effect.key.generation,
            reason=str(effect.reason),
            since_s=now_s,
        )
        self._touch(effect.model)

    def note(self, event: ClusterEvent, now_s: float) -> None:
        """Follows what happened to instances."""
        match event:
            case ActivationFinished((model, generation)):
                self._set_state(model, generation, InstanceState.READY, now_s)
            case NodeJoined():
                for instance in event.found:
                    self.note(instance, now_s)
            case InstanceFound((model, generation) as key, parts, loading):
                state = InstanceState.LOADING if loading else InstanceState.READY
                self._replicas.setdefault(model, {})[generation] = Replica(
                    parts=parts, state=state, generation=generation, reason="found", since_s=now_s
                )
                (self._taken_over.add if loading else self._taken_over.discard)(key)
                self._touch(model)
            case ActivationFailed((model, generation)) | DeactivationFinished((model, generation)):
                self._drop(model, generation)
            case InstanceLost((model, generation)):
                self._drop(model, generation)
            case NodeLost(node):
                for model, group in list(self._replicas.items()):
                    for generation, replica in list(group.items()):
                        if any(node_of(d) == node for d in replica.devices):
                            self._drop(model, generation)
            case _:
                pass

    def route(self, model: ModelName, devices: Sequence[DeviceId], now_s: float) -> None:
        """The scheduler's word on where requests of ``model`` go."""
        self._routes[model] = tuple(devices)
        self._touch(model)

    def route_of(self, model: ModelName) -> tuple[DeviceId, ...]:
        """The devices whose queues take the model's requests now."""
        return self._routes.get(model, ())

    def parts_of(self, key: InstanceKey) -> Parts:
        """Of one instance; none when there is no such instance."""
        replica = self._replicas.get(key.model, {}).get(key.generation)
        return () if replica is None else replica.parts

    def replicas(self, model: ModelName) -> list[Replica]:
        """The model's instances as they are published: only routed ones are ``ready``."""
        route = self._routes.get(model, ())
        return [
            msgspec.structs.replace(r, state=InstanceState.DRAINING) if r.ready and r.queue_device not in route else r
            for r in self._replicas.get(model, {}).values()
        ]

    async def published(self) -> None:
        """Returns when the store knows everything this object knows."""
        await self._written.wait()

    def models(self) -> list[ModelName]:
        return [model for model, group in self._replicas.items() if group]

    async def publish(self, holder: Callable[[], ControllerRecord]) -> None:
        """Writes changes to the store for ever, starting with a clean slate: what an earlier controller wrote about
        models that this one does not know of is removed. ``holder`` is asked each time: whoever renews the lease finds
        out whether it is lost for good."""
        await self._clear_leftovers(holder)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                model = self._dirty.pop()
                try:
                    await self._store.set_placement(model, self.replicas(model), holder())
                except (StoreUnavailable, LeaseLost) as error:
                    log.warning("placement of %s not published yet: %s", model, error)
                    self._dirty.add(model)
                    await asyncio.sleep(RETRY_S)
            self._written.set()

    async def _clear_leftovers(self, holder: Callable[[], ControllerRecord]) -> None:
        while True:
            try:
                for model in (await self._store.placement()).keys() - self._replicas.keys():
                    await self._store.set_placement(model, [], holder())
                return
            except (StoreUnavailable, LeaseLost):
                await asyncio.sleep(RETRY_S)

    def _set_state(self, model: ModelName, generation: Generation, state: InstanceState, now_s: float) -> None:
        group = self._replicas.get(model, {})
        if generation in group:
            group[generation] = msgspec.structs.replace(group[generation], state=state, since_s=now_s)
            self._touch(model)

    def _drop(self, model: ModelName, generation: Generation) -> None:
        self._taken_over.discard(InstanceKey(model, generation))
        if self._replicas.get(model, {}).pop(generation, None) is not None:
            self._touch(model)

    def _touch(self, model: ModelName) -> None:
        self._dirty.add(model)
        self._written.clear()
        self._wake.set()
