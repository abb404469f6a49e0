"""Layers in other engines as fake engines have them: orders are noted and believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from prism.engine.errors import OrderRefused
from prism.remote.orders import KvWay, RouteStop
from prism.remote.state import RemoteState


class FakeLayers:
    """Implements :class:`prism.engine.api.LayerOrders`. An engine that began with some pieces has all of them when
    :meth:`arrive` says so; ``refuses`` is what it answers every order with, ``whole_only`` that all engines of
    its model will, always."""

    def __init__(self, began_with: Sequence[int], layers: int) -> None:
        self.told: Callable[[], None] = lambda: None
        self.state: RemoteState | None = None
        """As the engine tells it."""
        self.served_at: Path | None = None
        self.routes: list[tuple[Sequence[RouteStop], ...]] = []
        self.grows = False
        self.refuses, self.whole_only = "", False
        self.order: Sequence[int] = ()
        self.when_whole = False
        self._layers = layers
        self._pieces = list(began_with)
        if began_with:
            self._tell([])

    async def serve_layers(self, path: Path) -> None:
        await asyncio.sleep(0)  # engines carry orders out between two steps: others may be given meanwhile
        self._check()
        self.served_at = path

    async def set_route(self, *routes: Sequence[RouteStop], answer_s: float = 60.0) -> None:
        self._check()
        self.routes.append(routes)
        self.grows = False
        self._tell([Path(stop.path).stem.removeprefix("layers-") for stop in routes[0] if stop.path])

    async def grow_route(self, kv: KvWay = KvWay.AUTO, order: Sequence[int] = (), when_whole: bool = False) -> None:
        self._check()
        self.grows, self.order, self.when_whole = True, order, when_whole

    def lose_peers(self) -> None:
        """The peers of its route are gone."""
        self._tell([])

    def arrive(self, *pieces: int) -> None:
        """These pieces are there; none: all are, and it serves alone."""
        assert self.grows and self.state is not None, "nobody told it to take over what arrives"
        self._pieces = sorted({*self._pieces, *(pieces or range(self._layers + 2))})
        self._tell(self.state.peers if pieces else [])

    def _tell(self, peers: list[str]) -> None:
        held = sum(1 <= piece <= self._layers for piece in self._pieces)
        alone = held == self._layers
        self.state = RemoteState(
            layers=self._layers, held_layers=held, pieces=self._pieces, alone=alone, peers=[] if alone else peers
        )
        self.told()

    def _check(self) -> None:
        if self.refuses:
            raise OrderRefused(self.refuses, self.whole_only)
