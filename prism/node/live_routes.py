"""Routes over engines of this machine for one that lacks layers: who could run them, and who is asked to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Final

from prism.core.instances import InstanceKey
from prism.core.views import InstanceState
from prism.engine.api import Handle
from prism.engine.errors import EngineGone, OrderRefused
from prism.node.local_instance import LocalInstance
from prism.policy.live.routes import Hop, LayerHelper, loads_downwards, plan_routes
from prism.remote.orders import RouteStop
from prism.remote.state import RemoteState

log = logging.getLogger(__name__)

ORDER_S: Final = 60.0
"""An engine that has not carried out an order by then is not asked again: it is between two steps every few
milliseconds, except when it is being stopped by somebody."""


class LiveRoutes:
    """Of one machine. ``folder`` takes the sockets at which engines run layers for others; None: they do not.
    ``instances`` are all that stand here."""

    def __init__(self, folder: Path | None, instances: Callable[[], Iterable[LocalInstance]]) -> None:
        self._folder, self._instances = folder, instances
        self._led: dict[InstanceKey, tuple[str, ...]] = {}
        """Who runs layers for whom, by key."""
        self._downwards: dict[InstanceKey, bool] = {}

    # --- who could ---

    def whole(self, model: str, leader: LocalInstance | None = None) -> list[LocalInstance]:
        """Instances of the model but ``leader`` that serve and have all of it, the least busy first."""
        found = [x for x in self._serving(model, leader) if x.handle is not None and has_all(x.handle)]
        return sorted(found, key=lambda x: (requests(x), x.key))

    def _serving(self, model: str, leader: LocalInstance | None) -> list[LocalInstance]:
        return [
            x
            for x in (self._instances() if self._folder is not None else ())
            if x.key.model == model
            and x is not leader
            and x.state is InstanceState.READY
            and x.handle is not None
            and x.handle.alive
        ]

    async def over(self, leader: LocalInstance, held: Set[int]) -> list[tuple[RouteStop, ...]]:
        """Routes for ``leader``, which has the pieces ``held``, the best first; every engine in them has been asked
        and runs layers for others. None: nobody here has what is missing."""
        here = {x.key for x in self._instances()}
        self._led = {key: names for key, names in self._led.items() if key in here}
        there = {str(x.key): x for x in self._serving(leader.key.model, leader)}
        paths: dict[str, Path] = {}
        while True:
            helpers = [self._helper(leader, name, x) for name, x in there.items()]
            routes = plan_routes(leader.spec.shape.layers + 2, held, helpers)
            asked = dict.fromkeys(hop.name for route in routes for hop in route if hop.name and hop.name not in paths)
            if not asked:
                break
            for name in asked:
                if (path := await self.ask(there[name], str(leader.key))) is None:
                    del there[name]
                else:
                    paths[name] = path
        if routes:
            self._led[leader.key] = tuple({hop.name for hop in routes[0] if hop.name})
        return [tuple(_stop(hop, paths) for hop in route) for route in routes]

    def _helper(self, leader: LocalInstance, name: str, instance: LocalInstance) -> LayerHelper:
        count = leader.spec.shape.layers + 2
        led = sum(
            count - len(held_pieces(x))
            for x in self._instances()
            if x.key != leader.key and name in self._led.get(x.key, ())
        )
        load = instance.handle.load if instance.handle else None
        abroad = () if load is None or load.remote is None else [w for w in load.remote.leaders if "/" in w]
        return LayerHelper(name, held_pieces(instance), led + count * len(abroad), requests(instance))

    # --- asking them ---

    async def ask(self, instance: LocalInstance, whom: str) -> Path | None:
        """Where the engine runs layers for others; None: it does not, which is logged."""
        assert instance.handle is not None
        path = self.socket(instance.handle)
        try:
            async with asyncio.timeout(ORDER_S):
                await instance.handle.remote.serve_layers(path)
        except (OrderRefused, EngineGone, TimeoutError) as error:
            log.warning("%s runs no layers for %s: %s", instance.key, whom, error or f"no answer in {ORDER_S:.0f} s")
            return None
        return path

    def socket(self, handle: Handle) -> Path:
        assert self._folder is not None
        return self._folder / f"layers-{handle.workers[0]}.sock"

    # --- in which order they load ---

    def downwards(self, leader: LocalInstance) -> bool:
        """Whether ``leader`` is to bring its last layers first; always the same of one instance."""
        if leader.key not in self._downwards:
            here = {x.key for x in self._instances() if x.key.model == leader.key.model}
            others = [downwards for key, downwards in self._downwards.items() if key in here]
            self._downwards[leader.key] = loads_downwards(others)
        return self._downwards[leader.key]

    def forget(self, leader: LocalInstance) -> None:
        """It needs nobody any more, or is gone."""
        self._led.pop(leader.key, None)
        self._downwards.pop(leader.key, None)


def _stop(hop: Hop, paths: dict[str, Path]) -> RouteStop:
    return RouteStop(str(paths[hop.name]) if hop.name else "", hop.first, hop.end)


def requests(instance: LocalInstance) -> int:
    """That it runs, as it last told."""
    load = instance.handle.load if instance.handle else None
    return load.running if load else 0


def held_pieces(instance: LocalInstance) -> frozenset[int]:
    """The pieces of its model that it has, as it last told."""
    handle = instance.handle
    if handle is None:
        return frozenset()
    state = remote_state(handle)
    if handle.began_with:
        return frozenset(handle.began_with if state is None else state.pieces)
    return frozenset(range(instance.spec.shape.layers + 2))


def has_all(handle: Handle) -> bool:
    """It runs its own requests by itself."""
    state = remote_state(handle)
    return not handle.began_with or (state is not None and state.alone)


def remote_state(handle: Handle) -> RemoteState | None:
    """What it last told of layers in others."""
    return handle.load.remote if handle.load is not None else None
