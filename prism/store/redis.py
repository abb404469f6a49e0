"""The store on a Redis (or Valkey) server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.exceptions import AuthenticationError

from prism.store.connection import LOST, Connection
from prism.store.redis_queues import RedisQueues
from prism.store.redis_state import RedisState
from prism.store.values import StoreRefused, StoreUnavailable


class RedisStore(RedisQueues, RedisState):
    """Implements :class:`prism.store.interface.Store`. One event loop per object."""

    def __init__(self, url: str, *, retry_s: float = 30.0, on_loss: Callable[[], None] = lambda: None) -> None:
        connection = Connection(url, retry_s=retry_s, on_loss=on_loss)
        RedisQueues.__init__(self, connection)
        RedisState.__init__(self, connection)

    async def ping(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._conn.client.ping()
        except AuthenticationError as error:
            raise StoreRefused(f"{self._conn.shown} refuses the connection: {error}") from error
        except LOST as error:
            raise StoreUnavailable(f"{self._conn.shown} does not answer: {error}") from error

    async def aclose(self) -> None:
        await self._conn.aclose()
