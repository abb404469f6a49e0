"""Engines that could run layers for one that lacks some: of this machine, and of others, who are asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prism.core.instances import InstanceKey
from prism.core.views import InstanceState
from prism.node.layers_network import HeldElsewhere, HeldPieces, Holders, LayersNetwork, LayersWanted
from prism.node.local_instance import LocalInstance
from prism.node.news import News
from prism.node.threads import in_own_thread
from prism.policy.live.routes import Company, LayerHelper
from prism.remote.state import RemoteState


@dataclass(frozen=True, slots=True)
class LayersAt:
    """One of this machine (``here``) or of another one (``there``)."""

    facts: LayerHelper
    here: LocalInstance | None = None
    there: HeldElsewhere | None = None


class LiveHelpers:
    """As one machine knows them. ``folder`` takes the sockets at which its engines run layers for others; None: they
    do not. ``instances`` are all that stand here; ``network`` reaches other machines; None: there are none."""

    def __init__(
        self, folder: Path | None, instances: Callable[[], Iterable[LocalInstance]], network: LayersNetwork | None
    ) -> None:
        self._folder, self._instances = folder, instances
        self.network = None if folder is None else network
        self._led: dict[InstanceKey, tuple[str, ...]] = {}
        """Who runs layers for whom of this machine, by key."""
        self._watched: dict[InstanceKey, dict[str, Holders | None]] = {}
        """By leader and machine, what its company has, as it was told; None: it was not yet."""
        self.news = News()
        """Of what instances have, here and at the company of those that are waiting for their pipeline."""

    # --- of this machine ---

    def serving(self, model: str, leader: LocalInstance | None = None) -> list[LocalInstance]:
        """Instances of the model but ``leader`` whose engines are there, the least busy first: those that have begun
        with some pieces run these for others before they serve."""
        found = [
            x
            for x in (self._instances() if self._folder is not None else ())
            if x.key.model == model
            and x is not leader
            and x.state in (InstanceState.LOADING, InstanceState.READY)
            and not x.life.leaves
            and x.handle is not None
            and x.handle.alive
        ]
        return sorted(found, key=lambda x: (requests(x), x.key))

    def here(self, leader: LocalInstance) -> list[LayersAt]:
        """Of this machine."""
        return [
            LayersAt(self._facts(leader, held_by(x, self._led_by(x, leader))), here=x) for x in self._others(leader)
        ]

    def _others(self, leader: LocalInstance) -> list[LocalInstance]:
        return self.serving(leader.key.model, leader)

    def held(self, wanted: LayersWanted) -> list[HeldPieces]:
        """What another machine is told."""
        return [held_by(x, self._led_by(x, None)) for x in self.serving(wanted.model)]

    def _led_by(self, instance: LocalInstance, leader: LocalInstance | None) -> int:
        """Pieces that it runs for others but ``leader``: leaders of other machines are counted as if they had none."""
        count = piece_count(instance)
        led = sum(
            count - len(held_pieces(x))
            for x in self._instances()
            if x is not leader and str(instance.key) in self._led.get(x.key, ())
        )
        state = remote_state(instance)
        return led + count * sum("/" in name for name in (state.leaders if state else ()))

    # --- of other machines ---

    @asynccontextmanager
    async def watching(self, leader: LocalInstance) -> AsyncIterator[None]:
        """Meanwhile the machines of its company tell what they have when that changes, and are not asked."""
        network, wanted = self.network, LayersWanted(leader.key.model, leader.part.lead)
        near = {} if network is None else _near(leader)
        seen = self._watched[leader.key] = dict[str, Holders | None].fromkeys(near)

        def tell(node: str, found: Holders) -> None:
            seen[node] = found
            self.news.tell()

        tasks = [
            asyncio.create_task(network.watch(node, at, wanted, partial(tell, node)))
            for node, at in near.items()
            if network is not None
        ]
        try:
            yield
        finally:
            del self._watched[leader.key]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def elsewhere(self, leader: LocalInstance) -> list[LayersAt]:
        """Of the machines that have its company; if none answers and it was not told of any, of all."""
        network, begins = self.network, leader.begins
        if network is None:
            return []
        if seen := self._watched.get(leader.key):
            told = [x for found in seen.values() for x in found or ()]
            return [LayersAt(self._facts(leader, x.held, far=True), there=x) for x in told]
        near = _near(leader)
        rest = {} if begins.pipelined else {n: at for n, at in leader.addresses.items() if n not in near}
        wanted = LayersWanted(leader.key.model, leader.part.lead)
        for addresses in (near, rest):
            if addresses and (found := await in_own_thread(network.holders, addresses, wanted)):
                return [LayersAt(self._facts(leader, x.held, far=True), there=x) for x in found]
        return []

    @staticmethod
    def _facts(leader: LocalInstance, held: HeldPieces, far: bool = False) -> LayerHelper:
        company = leader.begins.company.get(held.key, Company.OTHER)
        return LayerHelper(str(held.key), frozenset(held.pieces), held.led_pieces, held.requests, far, company)

    # --- whose routes lead where ---

    def peers(self, leader: LocalInstance) -> frozenset[str]:
        """Those over which its route was set to lead."""
        return frozenset(self._led.get(leader.key, ()))

    def note_route(self, leader: LocalInstance, names: Iterable[str]) -> None:
        """Its route leads over these from now on."""
        here = {x.key for x in self._instances()}
        self._led = {key: led for key, led in self._led.items() if key in here}
        self._led[leader.key] = tuple(names)

    def forget(self, leader: LocalInstance) -> None:
        """It needs nobody any more, or is gone."""
        self._led.pop(leader.key, None)


def _near(leader: LocalInstance) -> dict[str, str]:
    """The machines that have its company, and where they are asked."""
    return {node: at for node, at in leader.addresses.items() if node in leader.begins.nodes}


def held_by(instance: LocalInstance, led_pieces: int) -> HeldPieces:
    return HeldPieces(
        key=instance.key,
        device=instance.part.lead,
        pieces=sorted(held_pieces(instance)),
        led_pieces=led_pieces,
        requests=requests(instance),
    )


def piece_count(instance: LocalInstance) -> int:
    """Embedding, layers and head."""
    return instance.spec.shape.layers + 2


def requests(instance: LocalInstance) -> int:
    """That it runs, as it last told."""
    load = instance.handle.load if instance.handle else None
    return load.running if load else 0


def held_pieces(instance: LocalInstance) -> frozenset[int]:
    """The pieces of its model that it has, as it last told."""
    handle, state = instance.handle, remote_state(instance)
    if handle is None:
        return frozenset()
    if handle.began_with and not instance.came_whole:
        return frozenset(handle.began_with if state is None else state.pieces)
    return frozenset(range(piece_count(instance)))


def has_all(instance: LocalInstance) -> bool:
    """It runs its own requests by itself."""
    handle, state = instance.handle, remote_state(instance)
    return handle is not None and (not handle.began_with or instance.came_whole or (state is not None and state.alone))


def remote_state(instance: LocalInstance) -> RemoteState | None:
    """What it last told of layers in others."""
    load = instance.handle.load if instance.handle else None
    return None if load is None else load.remote
