"""The store on a Redis (or Valkey) server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from redis.exceptions import AuthenticationError

from prism.store.connection import LOST, Connection
from prism.store.redis_queues import RedisQueues
from prism.store.redis_state import RedisState
from prism.store.values import StoreRefused, StoreUnavailable

ANSWER_S: Final = 1.0
"""For one that is well to answer whether it is there."""


class RedisStore(RedisQueues, RedisState):
    """Implements :class:`prism.store.interface.Store`. One event loop per object."""

    def __init__(self, url: str, *, retry_s: float = 30.0, on_loss: Callable[[], None] = lambda: None) -> None:
        connection = Connection(url, retry_s=retry_s, on_loss=on_loss)
        RedisQueues.__init__(self, connection)
        RedisState.__init__(self, connection)

    async def ping(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._conn.client.ping()
        except AuthenticationError as error:
            raise StoreRefused(f"{self._conn.shown} refuses the connection: {error}") from error
        except LOST as error:
            why = str(error) or f"nothing came within {ANSWER_S:g} s"
            raise StoreUnavailable(f"{self._conn.shown} does not answer: {why}") from error

    async def aclose(self) -> None:
        await self._conn.aclose()
