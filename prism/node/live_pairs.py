"""Engines that begin before their weights are here, and engines that run the rest for them.

::

    new engine   embedding, layer 1 |             | head, sampling     its requests, from its own queue
    peer                            | layers 2..L |                    has all weights; serves its own requests, too

The boundary moves as weights arrive in the new engine, until it needs nobody (BlitzScale 5.2, its pair of an overloaded
and a loading instance; lambda-Scale 4.4 calls the end the mode switch). A peer is an engine of this machine
(:mod:`prism.node.live_routes`), or, where there is none, of another one (:mod:`prism.node.layers_network`). Several new
engines share those that have everything, and load from both ends, so that they have all layers between them when each
has half of them: then they run them for each other where nobody else is left. Without a peer, or when it is gone, an
engine that has begun waits for another one, or for its weights.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from prism.core.ids import DeviceId
from prism.core.settings import LiveMode
from prism.engine.api import Handle
from prism.engine.errors import EngineGone, OrderRefused
from prism.node.layers_network import FAILURES, LayersNetwork, LayersOffer, LayersWanted
from prism.node.live_routes import ORDER_S, LiveRoutes, has_all, remote_state, requests
from prism.node.local_instance import LocalInstance
from prism.node.measures import NodeMeasures
from prism.remote.handing import PREFIX, hand_over
from prism.remote.orders import RouteStop
from prism.wire.reports import RemoteReport

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
AGAIN_S: Final = 2.0
"""Between two tries to find a peer for an engine that lost its own."""


class LivePairs:
    """Of one machine. ``folder`` takes the sockets at which engines run layers for others; None: they do not.
    ``instances`` are all that stand here, ``changed`` is called when an engine needs its peer no more. ``network``
    reaches other machines; None: there are none."""

    def __init__(
        self,
        folder: Path | None,
        instances: Callable[[], Iterable[LocalInstance]],
        measures: NodeMeasures,
        changed: Callable[[], None],
        network: LayersNetwork | None = None,
    ) -> None:
        self._folder, self._instances, self._measures, self._changed = folder, instances, measures, changed
        self._routes = LiveRoutes(folder, instances)
        self._network = None if folder is None else network
        self._following: set[asyncio.Task[None]] = set()

    def offer(self) -> None:
        """From now on other machines may ask for engines of this one. Called in the agent's loop."""
        if self._network is not None:
            self._network.offer(LayersOffer(self._requests, self._take))

    async def first_pieces(self, leader: LocalInstance, live: LiveMode) -> tuple[int, ...]:
        """What the engine of ``leader``, which is about to be made, needs before it can serve: embedding, first layer
        (what the layers share is in its block) and head, or (empty) all of the model. A peer is asked first: one that
        cannot run layers for others says so, and what it cannot the new one cannot either."""
        layers = leader.spec.shape.layers
        if live is LiveMode.WHOLE or layers < 2 or self._folder is None:
            return ()
        first = (0, 1, layers + 1)
        if not await self._routes.over(leader, frozenset(first)) and await self._elsewhere(leader) is None:
            return ()
        return first

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
        here = {
            w: d for x in self._instances() if x.handle for w, d in zip(x.handle.workers, x.handle.devices, strict=True)
        }
        state = load.remote
        return RemoteReport(
            layers=state.layers,
            held_layers=state.held_layers,
            peers=_devices(state.peers, here),
            leaders=_devices(state.leaders, here),
        )

    def close(self) -> None:
        for task in self._following:
            task.cancel()

    async def _route(self, leader: LocalInstance, handle: Handle) -> None:
        head = leader.spec.shape.layers + 1
        routes = await self._routes.over(leader, _held(handle))
        if not routes and (stop := await self._connected(leader, handle)) is not None:
            routes = [(RouteStop("", 0, 2), RouteStop(stop, 2, head), RouteStop("", head, head + 1))]
        try:
            async with asyncio.timeout(ORDER_S):
                if routes:
                    await handle.remote.set_route(*routes)
                else:
                    log.warning("%s waits for its weights: no engine can run its layers", leader.key)
        except (OrderRefused, TimeoutError) as error:
            log.warning("%s waits for its weights: %s", leader.key, error or f"no answer within {ORDER_S:.0f} s")
        async with asyncio.timeout(ORDER_S):
            await handle.remote.grow_route(downwards=self._routes.downwards(leader))

    # --- peers of other machines ---

    async def _elsewhere(self, leader: LocalInstance) -> tuple[str, str] | None:
        """Name and address of the machine whose engine of the same model has the least to do."""
        if self._network is None:
            return None
        return await asyncio.to_thread(self._network.least_busy, leader.addresses, _wanted(leader))

    async def _connected(self, leader: LocalInstance, handle: Handle) -> str | None:
        """The route's stop at an engine of another machine, to which ``handle`` has been given a connection."""
        found = await self._elsewhere(leader)
        if found is None or self._network is None:
            return None
        token, mine = uuid.uuid4().hex, self._routes.socket(handle)
        try:
            async with asyncio.timeout(ORDER_S):
                await handle.remote.serve_layers(mine)  # there it takes the connection, too
            device, sock = await asyncio.to_thread(self._network.connect, *found, _wanted(leader))
            with sock:
                await asyncio.to_thread(hand_over, mine, sock, device, token)
        except (OrderRefused, *FAILURES) as error:
            log.warning("%s has no connection to %s: %s", leader.key, found[0], error or "no answer")
            return None
        return f"{PREFIX}{token}"

    def _requests(self, wanted: LayersWanted) -> int:
        found = self._routes.whole(wanted.model)
        if not found:
            raise OrderRefused(f"no engine here has all of {wanted.model}")
        return requests(found[0])

    async def _take(self, wanted: LayersWanted, sock: socket.socket) -> DeviceId:
        for instance in self._routes.whole(wanted.model):
            if (path := await self._routes.ask(instance, wanted.device)) is not None:
                await asyncio.to_thread(hand_over, path, sock, wanted.device)
                return instance.part.lead
        raise OrderRefused(f"no engine here runs layers of {wanted.model}")

    # --- until it is alone ---

    async def _somebody(self, leader: LocalInstance, handle: Handle) -> bool:
        """Whether what it lacks runs anywhere: an engine that can go on by itself soon is not to begin again."""
        return bool(await self._routes.over(leader, _held(handle))) or await self._elsewhere(leader) is not None

    async def _follow(self, leader: LocalInstance, handle: Handle, began_s: float) -> None:
        """Until it needs nobody: finds another peer when the one it had is gone."""
        routed_s = began_s
        try:
            while handle.alive and not has_all(handle):
                if _lost_its_peers(handle) and time.monotonic() >= routed_s + AGAIN_S:
                    if await self._somebody(leader, handle):
                        with suppress(EngineGone, OrderRefused, TimeoutError):  # its end is seen elsewhere
                            await self._route(leader, handle)
                    routed_s = time.monotonic()
                await asyncio.sleep(LOOK_S)
        finally:
            self._routes.forget(leader)
        if handle.alive:
            seconds = time.monotonic() - began_s
            log.info("%s has all its weights and serves alone after %.3f s", leader.key, seconds)
            self._measures.went_alone(leader.key.model, seconds)
            self._changed()


def _held(handle: Handle) -> frozenset[int]:
    state = remote_state(handle)
    return frozenset(state.pieces if state else handle.began_with)


def _wanted(leader: LocalInstance) -> LayersWanted:
    return LayersWanted(leader.key.model, leader.part.lead)


def _devices(engines: Iterable[str], here: Mapping[str, DeviceId]) -> list[str]:
    """Of engines as :class:`RemoteState` names them; those of this machine that are gone are left out."""
    return [found for engine in engines if (found := here.get(engine, engine if "/" in engine else ""))]


def _lost_its_peers(handle: Handle) -> bool:
    state = remote_state(handle)
    return state is not None and not state.peers
