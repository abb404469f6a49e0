"""Engines that begin before their weights are here, and engines that run the rest for them.

::

    new engine   embedding, layer 1 |             | head, sampling     its requests, from its own queue
    peer                            | layers 2..L |                    has all weights; serves its own requests, too

The boundary moves as weights arrive in the new engine, until it needs nobody (BlitzScale 5.2, its pair of an overloaded
and a loading instance; lambda-Scale 4.4 calls the end the mode switch). A peer is an engine of this machine, or of
another one (:mod:`prism.node.live_helpers`). Several that come at once load from different ends, so that they have all
layers between them long before each does: then they run them for each other, if they were ordered as an execution
pipeline (lambda-Scale 4.3), or where nobody else is left::

    r0  a/host:0   0 1 2 3 4 |         | head    leads its own requests, runs layers 2 to 4 for r1
    r1  b/host:0   0 1       | 5 6 7 8 | head    leads its own requests, runs layers 5 to 8 for r0

Without a peer, or when it is gone, an engine that has begun waits for another one, or for its weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from prism.core.ids import DeviceId
from prism.core.settings import LiveMode
from prism.engine.api import Handle
from prism.engine.errors import EngineGone, OrderRefused
from prism.node.layers_network import LayersNetwork, LayersOffer
from prism.node.live_helpers import LiveHelpers, has_all, held_pieces, piece_count, remote_state
from prism.node.live_routes import ORDER_S, LiveRoutes
from prism.node.local_instance import LocalInstance
from prism.node.measures import NodeMeasures
from prism.policy.live.able import whole_only
from prism.policy.live.routes import Company, leaves_for_pipeline, worth_switching
from prism.wire.reports import RemoteReport

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
AGAIN_S: Final = 2.0
"""Between two tries to find a peer for an engine that lost its own."""
PIPELINE_S: Final = 0.1
"""Between two looks whether those that come together have all layers between them."""


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
        self._helpers = LiveHelpers(folder, instances, network)
        self._routes = LiveRoutes(folder, self._helpers)
        self._following: set[asyncio.Task[None]] = set()

    def offer(self) -> None:
        """From now on other machines may ask for engines of this one. Called in the agent's loop."""
        if self._helpers.network is not None:
            self._helpers.network.offer(LayersOffer(self._routes.held, self._helpers.news.next, self._routes.take))

    async def first_pieces(self, leader: LocalInstance) -> tuple[int, ...]:
        """What the engine of ``leader``, which is about to be made, needs before it can serve: embedding, first layer
        (what the layers share is in its block) and head, or (empty) all of the model. A peer is asked first, unless
        others come with it that will be its peers. One that does not lead at first runs layers before it can."""
        if leader.begins.mode is LiveMode.WHOLE or self._folder is None or whole_only(leader.spec):
            return ()
        first = (0, 1, piece_count(leader) - 1)
        if leader.begins.pipelined and not leader.begins.leads:
            return (1,)
        if leader.begins.pipelined or await self._routes.possible(leader, frozenset(first)):
            return first
        same = (x for x in self._instances() if x.key.model == leader.key.model)
        leader.whole_only = next((x.whole_only for x in same if x.whole_only), "")
        return ()

    async def lead(self, leader: LocalInstance, handle: Handle) -> bool:
        """If ``handle`` began with some of its pieces: a route for the others, and to take these over as they come.
        Returns when it can serve: at once, or, if it comes with others, when somebody has what it lacks. False: it has
        all its weights, or was told to leave. Raises :class:`EngineGone` when it ended."""
        if not handle.began_with:
            return False
        began_s = time.monotonic()
        handle.remote.told = self._helpers.news.tell
        self._helpers.news.tell()
        if not await self._begin(leader, handle):
            return False
        if leader.begins.pipelined:
            await self._wait_for_pipeline(leader, handle)
        if not handle.alive:
            raise EngineGone(f"the engine of {leader.key} ended before it served")
        if has_all(leader) or leader.life.leaves:
            self._forget(leader)
            return False
        self._measures.began_early(leader.key.model, leader.part.devices)
        task = asyncio.create_task(self._follow(leader, handle, began_s))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return True

    async def _wait_for_pipeline(self, leader: LocalInstance, handle: Handle) -> None:
        """Until it has a route, or all layers, or has ended or is to. Looks whenever anybody has another layer."""
        news = self._helpers.news
        async with self._helpers.watching(leader):
            while handle.alive and not (self._helpers.peers(leader) or has_all(leader) or leader.life.leaves):
                number = news.number
                await self._route(leader, handle)
                if not self._helpers.peers(leader):
                    await news.since(number, PIPELINE_S)

    def report(self, instance: LocalInstance) -> RemoteReport | None:
        """What the engine said of layers in other engines, with these named by their devices."""
        if (state := remote_state(instance)) is None:
            return None
        here = {
            w: d for x in self._instances() if x.handle for w, d in zip(x.handle.workers, x.handle.devices, strict=True)
        }
        return RemoteReport(
            layers=state.layers,
            held_layers=state.held_layers,
            peers=_devices(state.peers, here),
            leaders=_devices(state.leaders, here),
        )

    def close(self) -> None:
        for task in self._following:
            task.cancel()
        self._routes.close()
        if self._helpers.network is not None:
            self._helpers.network.close()

    async def _begin(self, leader: LocalInstance, handle: Handle) -> bool:
        """False: it cannot run layers apart, and has waited for all, however long that took."""
        try:
            await self._grow(leader, handle, None)
        except OrderRefused as error:
            log.warning("%s serves with all its weights only: %s", leader.key, error)
            leader.came_whole, leader.whole_only = True, str(error) if error.whole_only else ""
            return False
        if not await self._route(leader, handle) and not leader.begins.pipelined:
            log.warning("%s waits for its weights: no engine can run its layers", leader.key)
        return True

    async def _route(self, leader: LocalInstance, handle: Handle) -> bool:
        """Whether its requests follow a (new) route now."""
        held = held_pieces(leader)
        if len(held) == piece_count(leader):
            return False  # it goes on alone at its next step, and no request has to begin again for that
        if not (routes := await self._routes.over(leader, handle, held)):
            return False
        growing = asyncio.create_task(self._grow(leader, handle))  # both between the same two steps
        try:
            async with asyncio.timeout(ORDER_S):
                await handle.remote.set_route(*routes)
        except (OrderRefused, TimeoutError) as error:
            self._helpers.note_route(leader, ())
            log.warning("%s waits for its weights: %s", leader.key, error or f"no answer within {ORDER_S:.0f} s")
            return False
        finally:
            await growing
        log.info("%s leads over %s", leader.key, ", ".join(sorted(self._helpers.peers(leader))) or "nobody")
        return True

    async def _grow(self, leader: LocalInstance, handle: Handle, limit_s: float | None = ORDER_S) -> None:
        """In a pipeline nothing is taken over before everything is here: all of it would run as much as before."""
        beside = {x.key for x in self._instances() if x.key.model == leader.key.model}
        together = leader.begins.pipelined and self._helpers.peers(leader) <= _coming(leader)
        async with asyncio.timeout(limit_s):
            await handle.remote.grow_route(order=self._routes.order(leader, beside), when_whole=together)

    # --- until it is alone ---

    async def _follow(self, leader: LocalInstance, handle: Handle, began_s: float) -> None:
        """Until it needs nobody: finds another peer when the one it had is gone, and changes over to its pipeline when
        that has all layers."""
        routed_s = looked_s = time.monotonic()
        try:
            while handle.alive and not has_all(leader):
                await asyncio.sleep(LOOK_S)
                with suppress(EngineGone, OrderRefused, TimeoutError):  # its end is seen elsewhere
                    if _lost_its_peers(leader) and time.monotonic() >= routed_s + AGAIN_S:
                        if await self._routes.possible(leader, held_pieces(leader)):
                            await self._route(leader, handle)
                        routed_s = looked_s = time.monotonic()
                    elif leader.begins.pipelined and time.monotonic() >= looked_s + PIPELINE_S:
                        if await self._can_change_over(leader):
                            await self._route(leader, handle)
                            routed_s = time.monotonic()
                        looked_s = time.monotonic()
        finally:
            self._forget(leader)
        if handle.alive:
            seconds = time.monotonic() - began_s
            log.info("%s has all its weights and serves alone after %.3f s", leader.key, seconds)
            self._measures.went_alone(leader.key.model, seconds)
            self._changed()

    async def _can_change_over(self, leader: LocalInstance) -> bool:
        """To its pipeline. Others are not asked in vain."""
        held, peers, count = held_pieces(leader), self._helpers.peers(leader), piece_count(leader)
        if not worth_switching(count, held) or not any(peer not in _coming(leader) for peer in peers):
            return False
        helpers = [*self._helpers.here(leader), *await self._helpers.elsewhere(leader)]
        return leaves_for_pipeline(count, held, [helper.facts for helper in helpers], peers)

    def _forget(self, leader: LocalInstance) -> None:
        self._routes.forget(leader)
        self._helpers.forget(leader)


def _devices(engines: Iterable[str], here: Mapping[str, DeviceId]) -> list[str]:
    """Of engines as :class:`RemoteState` names them; those of this machine that are gone are left out."""
    return [found for engine in engines if (found := here.get(engine, engine if "/" in engine else ""))]


def _coming(leader: LocalInstance) -> set[str]:
    """Those that were ordered with it."""
    return {str(key) for key, company in leader.begins.company.items() if company is not Company.OTHER}


def _lost_its_peers(leader: LocalInstance) -> bool:
    state = remote_state(leader)
    return state is not None and not state.peers
