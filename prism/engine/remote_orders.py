"""Orders about layers in other engines, as the node agent gives them to an engine (:mod:`prism.remote.orders`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from prism.engine.errors import EngineGone, OrderRefused
from prism.remote.orders import GrowRoute, HoldPieces, KvWay, Order, OrderDone, RouteStop, ServeLayers, SetRoute


class RemoteOrders:
    """Of one engine. Every method waits until the engine has done it, between two of its steps, and raises
    :class:`OrderRefused`, or :class:`EngineGone` when it ends meanwhile."""

    def __init__(self, send: Callable[[Order], None]) -> None:
        self._send = send
        self.told: Callable[[], None] = lambda: None
        """See :attr:`prism.engine.api.LayerOrders.told`."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[OrderDone]] = {}

    async def serve_layers(self, path: Path) -> None:
        """Run layers for engines that connect at ``path``."""
        await self._give(ServeLayers(number=next(self._numbers), path=str(path)))

    async def hold_pieces(self, pieces: Sequence[int]) -> None:
        """Have the weights of these pieces in memory and no others."""
        await self._give(HoldPieces(number=next(self._numbers), pieces=list(pieces)))

    async def set_route(
        self, *routes: Sequence[RouteStop], answer_s: float = 60.0, whole_prefills: bool = False
    ) -> None:
        """Lead requests over the first route, and over the next one when a peer is lost."""
        stops = [list(route) for route in routes]
        await self._give(
            SetRoute(number=next(self._numbers), routes=stops, answer_s=answer_s, whole_prefills=whole_prefills)
        )

    async def grow_route(self, kv: KvWay = KvWay.AUTO, order: Sequence[int] = (), when_whole: bool = False) -> None:
        """Take over what peers run, as its weights arrive (``order``: of pieces, where several have arrived), or
        ``when_whole``: all at once. Returns when it has begun."""
        await self._give(GrowRoute(number=next(self._numbers), kv=kv, order=list(order), when_whole=when_whole))

    async def _give(self, order: Order) -> None:
        answer: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._answers[order.number] = answer
        try:
            self._send(order)
            done = await answer
        finally:
            del self._answers[order.number]
        if done.error:
            raise OrderRefused(done.error, done.whole_only)

    def on_done(self, done: OrderDone) -> None:
        """The engine's answer."""
        answer = self._answers.get(done.number)
        if answer is not None and not answer.done():
            answer.set_result(done)

    def on_gone(self, why: str) -> None:
        """The engine ended."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGone(why))
