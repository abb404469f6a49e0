"""Engines that begin before their weights are here, and engines of this machine that run the rest for them.

::

    new engine   embedding, layer 1 |             | head, sampling     its requests, from its own queue
    peer                            | layers 2..L |                    has all weights; serves its own requests, too

The boundary moves to the right as weights arrive in the new engine, until it needs nobody (BlitzScale 5.2, its pair of
an overloaded and a loading instance; lambda-Scale 4.4 calls the end the mode switch). Without a peer, or when it is
gone, an engine that has begun waits for another one, or for its weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from prism.core.settings import LiveMode
from prism.core.views import InstanceState
from prism.engine.api import Handle
from prism.engine.errors import EngineGone, OrderRefused
from prism.node.local_instance import LocalInstance
from prism.node.measures import NodeMeasures
from prism.remote.orders import RouteStop
from prism.wire.messages import RemoteReport

log = logging.getLogger(__name__)

ORDER_S: Final = 60.0
"""An engine that has not carried out an order by then is not asked again: it is between two steps every few
milliseconds, except when it is being stopped by somebody."""
LOOK_S: Final = 0.05
AGAIN_S: Final = 2.0
"""Between two tries to find a peer for an engine that lost its own."""


class LivePairs:
    """Of one machine. ``folder`` takes the sockets at which engines run layers for others; None: they do not.
    ``instances`` are all that stand here, ``changed`` is called when an engine needs its peer no more."""

    def __init__(
        self,
        folder: Path | None,
        instances: Callable[[], Iterable[LocalInstance]],
        measures: NodeMeasures,
        changed: Callable[[], None],
    ) -> None:
        self._folder, self._instances, self._measures, self._changed = folder, instances, measures, changed
        self._following: set[asyncio.Task[None]] = set()

    async def first_pieces(self, leader: LocalInstance, live: LiveMode) -> tuple[int, ...]:
        """What the engine of ``leader``, which is about to be made, needs before it can serve: embedding, first layer
        (what the layers share is in its block) and head, or (empty) all of the model. A peer is asked first: one that
        cannot run layers for others says so, and what it cannot the new one cannot either."""
        layers = leader.spec.shape.layers
        if live is LiveMode.WHOLE or layers < 2 or await self._peer(leader) is None:
            return ()
        return (0, 1, layers + 1)

    async def lead(self, leader: LocalInstance, handle: Handle) -> None:
        """If ``handle`` began with some of its pieces: a route for the others, and to take these over as they come.
        Raises :class:`EngineGone` when it ended."""
        if not handle.began_with:
            return
        self._measures.began_early(leader.key.model, leader.part.devices)
        await self._route(leader, handle)
        task = asyncio.create_task(self._follow(leader, handle, time.monotonic()))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    def report(self, instance: LocalInstance) -> RemoteReport | None:
        """What the engine said of layers in other engines, with these named by their devices."""
        load = instance.handle.load if instance.handle else None
        if load is None or load.remote is None:
            return None
        devices = {
            w: d for x in self._instances() if x.handle for w, d in zip(x.handle.workers, x.handle.devices, strict=True)
        }
        state = load.remote
        return RemoteReport(
            layers=state.layers,
            held_layers=state.held_layers,
            peers=[devices[worker] for worker in state.peers if worker in devices],
            leaders=[devices[worker] for worker in state.leaders if worker in devices],
        )

    def close(self) -> None:
        for task in self._following:
            task.cancel()

    async def _route(self, leader: LocalInstance, handle: Handle) -> None:
        head = leader.spec.shape.layers + 1
        path = await self._peer(leader)
        try:
            async with asyncio.timeout(ORDER_S):
                if path is None:
                    log.warning("%s waits for its weights: no engine here can run its layers", leader.key)
                else:
                    stops = RouteStop("", 0, 2), RouteStop(str(path), 2, head), RouteStop("", head, head + 1)
                    await handle.remote.set_route(stops)
        except (OrderRefused, TimeoutError) as error:
            log.warning("%s waits for its weights: %s", leader.key, error or f"no answer within {ORDER_S:.0f} s")
        async with asyncio.timeout(ORDER_S):
            await handle.remote.grow_route()

    async def _peer(self, leader: LocalInstance) -> Path | None:
        """Where the least busy engine of the same model that has all of it runs layers for others."""
        found = [
            (x.handle.load.running if x.handle.load else 0, x.key, x.handle) for x in self._whole(leader) if x.handle
        ]
        for _, key, handle in sorted(found, key=lambda one: one[:2]):
            assert self._folder is not None  # otherwise none was found
            path = self._folder / f"layers-{handle.workers[0]}.sock"
            try:
                async with asyncio.timeout(ORDER_S):
                    await handle.remote.serve_layers(path)
            except (OrderRefused, EngineGone, TimeoutError) as error:
                log.warning("%s runs no layers for %s: %s", key, leader.key, error or f"no answer in {ORDER_S:.0f} s")
            else:
                return path
        return None

    def _whole(self, leader: LocalInstance) -> list[LocalInstance]:
        """Instances of the same model that serve and have all of it."""
        if self._folder is None or len(leader.part.devices) > 1:
            return []
        return [
            x
            for x in self._instances()
            if x.key.model == leader.key.model
            and x is not leader
            and x.state is InstanceState.READY
            and x.handle is not None
            and x.handle.alive
            and (not x.handle.began_with or _alone(x.handle))
        ]

    async def _follow(self, leader: LocalInstance, handle: Handle, began_s: float) -> None:
        """Until it needs nobody: finds another peer when the one it had is gone."""
        routed_s = began_s
        while handle.alive and not _alone(handle):
            if _lost_its_peers(handle) and time.monotonic() >= routed_s + AGAIN_S:
                if self._whole(leader):
                    with suppress(EngineGone, OrderRefused, TimeoutError):  # its end is seen elsewhere
                        await self._route(leader, handle)
                routed_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
        if handle.alive:
            seconds = time.monotonic() - began_s
            log.info("%s has all its weights and serves alone after %.3f s", leader.key, seconds)
            self._measures.went_alone(leader.key.model, seconds)
            self._changed()


def _alone(handle: Handle) -> bool:
    load = handle.load
    return load is not None and load.remote is not None and load.remote.alone


def _lost_its_peers(handle: Handle) -> bool:
    load = handle.load
    return load is not None and load.remote is not None and not load.remote.peers
