"""Routes for an engine that lacks layers: planned over those that could run them, who are then asked, or connected."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final
from weakref import WeakSet

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.views import InstanceState
from prism.engine.api import Handle
from prism.engine.errors import EngineGone, OrderRefused
from prism.node.layers_network import FAILURES, HeldElsewhere, HeldPieces, LayersWanted
from prism.node.live_helpers import LayersAt, LiveHelpers, piece_count
from prism.node.local_instance import LocalInstance
from prism.node.threads import in_own_thread
from prism.policy.live.routes import Company, Hop, layer_order, next_turn, plan_routes
from prism.remote.handing import PREFIX, hand_over
from prism.remote.hub import MAX_HANDED
from prism.remote.orders import RouteStop

log = logging.getLogger(__name__)

ORDER_S: Final = 60.0
"""An engine that has not carried out an order by then is not asked again: it is between two steps every few
milliseconds, except when it is being stopped by somebody."""
PATIENCE_S: Final = 0.3
PATIENCE_SHARE: Final = 0.1
"""An instance waits so long for its own pipeline when others could run its layers; or for such a part of the time since
it was ordered, if that is longer: the slower weights come, the further apart they come."""
MOST_AHEAD: Final = MAX_HANDED // 2
"""An instance connects with so many before it knows over whom it will lead."""
Stops = tuple[RouteStop, ...]


class LiveRoutes:
    """Of one machine. ``folder`` takes the sockets at which engines run layers for others."""

    def __init__(self, folder: Path | None, helpers: LiveHelpers) -> None:
        self._folder, self._helpers = folder, helpers
        self._turns: dict[InstanceKey, int] = {}
        self._complete_s: dict[InstanceKey, float] = {}
        """Since when those that come with an instance have everything together."""
        self._ahead: dict[InstanceKey, dict[str, str | None]] = {}
        """By leader paths of stops, by name, that no route has used yet; None: it could not be had."""
        self._listening: WeakSet[Handle] = WeakSet()
        """Engines that run layers for others: none has to be asked twice, which would take one of its steps."""
        self._prepared: WeakSet[Handle] = WeakSet()
        self._preparing: set[asyncio.Task[Path | None]] = set()

    # --- planned ---

    async def possible(self, leader: LocalInstance, held: Set[int]) -> bool:
        """Whether an engine with the pieces ``held`` would get a route. Those of this machine are asked: one that
        cannot run layers for others says so, and what it cannot the new one cannot either."""
        helpers, asked_others, asked = self._helpers.here(leader), False, set[str]()
        while True:
            if not (routes := self._plan(leader, held, helpers)):
                if asked_others:
                    return False
                helpers, asked_others = [*helpers, *await self._helpers.elsewhere(leader)], True
                continue
            names = {hop.name for hop in routes[0] if hop.name}
            helper = next((h for h in helpers if h.here is not None and h.facts.name in names - asked), None)
            if helper is None or helper.here is None:
                return True
            asked.add(helper.facts.name)
            if await self.ask(helper.here, str(leader.key)) is None:
                helpers = [h for h in helpers if h is not helper]

    async def over(self, leader: LocalInstance, handle: Handle, held: Set[int]) -> list[Stops]:
        """Routes for ``leader``, which has the pieces ``held``, the best first; every engine in them has been asked, or
        connected with, and runs layers for others. None: nobody has what is missing. One of its machine that can run
        all of it is enough, unless it is to serve with those that come with it."""
        far: list[LayersAt] | None = None
        ahead = self._ahead.setdefault(leader.key, {})
        reached: dict[str, str | None] = {name: path for name, path in ahead.items() if path is not None}
        while True:  # what runs where on this machine may have changed while somebody was asked
            known = [*self._helpers.here(leader), *(far or ())]
            helpers = [h for h in known if h.facts.name not in reached or reached[h.facts.name] is not None]
            routes = self._plan(leader, held, helpers)
            if far is None and (not routes or leader.begins.pipelined):
                far = await self._helpers.elsewhere(leader)
                continue
            names = {hop.name for route in routes for hop in route if hop.name}
            if routes and self._waits_for_pipeline(leader, {hop.name for hop in routes[0] if hop.name}):
                return []
            if not routes:
                names = self._company(leader, helpers) - ahead.keys()
            if not (unknown := [h for h in helpers if h.facts.name in names - reached.keys()]):
                break
            paths = await asyncio.gather(*(self._reach(leader, handle, helper) for helper in unknown))
            came = {helper.facts.name: path for helper, path in zip(unknown, paths, strict=True)}
            reached |= came
            ahead |= came
        for name in {hop.name for route in routes for hop in route}:
            ahead.pop(name, None)
        self._helpers.note_route(leader, {hop.name for hop in routes[0] if hop.name} if routes else ())
        return [tuple(_stop(hop, reached) for hop in route) for route in routes]

    @staticmethod
    def _company(leader: LocalInstance, helpers: Sequence[LayersAt]) -> set[str]:
        """With whom to connect before they have everything: those that come with it, of the pipeline that is waited for
        first; routes for when that breaks lead over the others, and are set together with its own."""
        if leader.state is not InstanceState.LOADING or not leader.begins.pipelined:
            return set()
        coming = sorted((h.facts.company, h.facts.name) for h in helpers if h.facts.company is not Company.OTHER)
        return {name for _, name in coming[:MOST_AHEAD]}

    def _waits_for_pipeline(self, leader: LocalInstance, names: Set[str]) -> bool:
        """Those that come with it have everything together, its own pipeline has not: that will have it in a moment, as
        others of the same sub-groups have it now. Whoever led over these would make them work for two pipelines."""
        mine = {str(key) for key, company in leader.begins.company.items() if company is Company.PIPELINE}
        loading = leader.state is InstanceState.LOADING and leader.begins.waits_for_company
        if not loading or not mine or names <= mine:
            return False
        now_s = time.monotonic()
        patience_s = max(PATIENCE_S, PATIENCE_SHARE * (now_s - leader.ordered_s))
        return now_s - self._complete_s.setdefault(leader.key, now_s) < patience_s

    @staticmethod
    def _plan(leader: LocalInstance, held: Set[int], helpers: Sequence[LayersAt]) -> tuple[tuple[Hop, ...], ...]:
        facts, count = [helper.facts for helper in helpers], piece_count(leader)
        if not held >= {0, count - 1}:
            return ()  # it runs layers for others so far
        if leader.state is InstanceState.LOADING and leader.begins.waits_for_company:
            facts = [one for one in facts if one.company is not Company.OTHER]
        whole = {one.name for one in facts if len(one.held) == count}
        before = sum(str(key) not in whole and key < leader.key for key in leader.begins.company)
        return plan_routes(count, held, facts, leader.begins.pipelined, before)

    # --- reached ---

    async def _reach(self, leader: LocalInstance, handle: Handle, helper: LayersAt) -> str | None:
        """The path of a stop there; None: it cannot be had, which is logged."""
        if helper.here is not None:
            path = await self.ask(helper.here, str(leader.key))
            return None if path is None else str(path)
        assert helper.there is not None
        return await self._connected(leader, handle, helper.there)

    def held(self, wanted: LayersWanted) -> list[HeldPieces]:
        """What another machine is told, whose new instance will lead over one of these in a moment. They are had to
        listen meanwhile: an engine begins to between two of its steps, and connections are taken in within them."""
        for instance in self._helpers.serving(wanted.model):
            handle = instance.handle
            if instance.state is InstanceState.READY and handle is not None and handle not in self._prepared:
                self._prepared.add(handle)
                task = asyncio.create_task(self.ask(instance, wanted.device))
                self._preparing.add(task)
                task.add_done_callback(self._preparing.discard)
        return self._helpers.held(wanted)

    def close(self) -> None:
        """Prepare nobody any more."""
        for task in self._preparing:
            task.cancel()

    async def ask(self, instance: LocalInstance, whom: str) -> Path | None:
        """Where the engine runs layers for others; None: it does not, which is logged. One that never will is asked
        once only."""
        if instance.whole_only:
            return None
        assert instance.handle is not None
        path = self._socket(instance.handle)
        try:
            await self._listen(instance.handle, path)
        except (OrderRefused, EngineGone, TimeoutError) as error:
            log.warning("%s runs no layers for %s: %s", instance.key, whom, error or f"no answer in {ORDER_S:.0f} s")
            if isinstance(error, OrderRefused) and error.whole_only:
                instance.whole_only = str(error)
            return None
        return path

    async def _listen(self, handle: Handle, path: Path) -> None:
        """Raises :class:`OrderRefused`, :class:`EngineGone` or ``TimeoutError``."""
        if handle in self._listening:
            return
        async with asyncio.timeout(ORDER_S):
            await handle.remote.serve_layers(path)
        self._listening.add(handle)

    async def _connected(self, leader: LocalInstance, handle: Handle, there: HeldElsewhere) -> str | None:
        """A connection to an engine of another machine is given to ``handle``."""
        network = self._helpers.network
        assert network is not None
        token, mine = uuid.uuid4().hex, self._socket(handle)
        try:
            await self._listen(handle, mine)  # there it takes the connection, too
            wanted = LayersWanted(leader.key.model, leader.part.lead)
            device, sock = await in_own_thread(network.connect, there, wanted)
            with sock:
                await in_own_thread(hand_over, mine, sock, device, token)
        except (OrderRefused, *FAILURES) as error:
            log.warning("%s has no connection to %s: %s", leader.key, there.held.key, error or "no answer")
            return None
        return f"{PREFIX}{token}"

    async def take(self, wanted: LayersWanted, sock: socket.socket) -> DeviceId:
        """Give a connection from another machine to the engine that it is for; the device. Raises
        :class:`OrderRefused`."""
        for instance in self._helpers.serving(wanted.model):
            if wanted.key not in (None, instance.key) or (path := await self.ask(instance, wanted.device)) is None:
                continue
            try:
                await in_own_thread(hand_over, path, sock, wanted.device)
            except OSError as error:
                raise OrderRefused(f"the engine of {instance.key} did not take the connection: {error}") from error
            return instance.part.lead
        raise OrderRefused(f"no engine here runs layers of {wanted.key or wanted.model}")

    def _socket(self, handle: Handle) -> Path:
        assert self._folder is not None
        return self._folder / f"layers-{handle.workers[0]}.sock"

    # --- in which order they load ---

    def order(self, leader: LocalInstance, beside: Set[InstanceKey]) -> tuple[int, ...]:
        """The order in which ``leader`` is to bring its pieces; always the same of one instance. Without an order of
        its own it shares the layers with those ``beside`` it on its machine: from both ends, in turns."""
        begins, layers = leader.begins, leader.spec.shape.layers
        if begins.turns > 1:
            return layer_order(layers, begins.turn, begins.turns)
        if leader.key not in self._turns:
            taken = [turn for key, turn in self._turns.items() if key in beside]
            self._turns[leader.key] = next_turn(taken, 2)
        return layer_order(layers, self._turns[leader.key], 2)

    def forget(self, leader: LocalInstance) -> None:
        """It needs nobody any more, or is gone."""
        self._turns.pop(leader.key, None)
        self._complete_s.pop(leader.key, None)
        self._ahead.pop(leader.key, None)


def _stop(hop: Hop, reached: Mapping[str, str | None]) -> RouteStop:
    return RouteStop(reached[hop.name] or "" if hop.name else "", hop.first, hop.end)
