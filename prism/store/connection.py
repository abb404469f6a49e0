"""One Redis connection pool with the retry rule of the whole store: a lost server is waited for, then the command is
repeated."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import redis.asyncio as aioredis
import redis.exceptions as errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript

from prism.core.errors import InvalidValue
from prism.store import scripts
from prism.store.together import Together
from prism.store.values import StoreRefused, StoreUnavailable
from prism.wire.secret import without_password

log = logging.getLogger(__name__)

T = TypeVar("T")

LOST: Final = (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError, OSError, asyncio.TimeoutError)
"""What a command raises when the server went away or is still reading its file."""

UNWILLING: Final = ("OOM", "MISCONF", "READONLY", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN")
"""Words with which a server that answers takes no writes: full, its disk is full, it is only a copy. Somebody has to
mend it; whoever writes is told at once and may try again later."""

SCHEMES: Final = ("unix://", "redis://", "rediss://")


def is_unwilling(error: errors.ResponseError) -> bool:
    """Whether the server answers and takes no writes; a script's error has the server's words inside."""
    return isinstance(error, errors.OutOfMemoryError | errors.ReadOnlyError) or any(
        re.search(rf"\b{word}\b", str(error)) for word in UNWILLING
    )


class Connection:
    """Commands with retries. ``retry_s`` bounds how long a call waits for a server that is down."""

    def __init__(
        self,
        url: str,
        *,
        retry_s: float = 30.0,
        max_connections: int = 64,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        if not url.startswith(SCHEMES):
            raise InvalidValue("redis-url", url, "not a Redis address", [f"{scheme}..." for scheme in SCHEMES])
        self.url, self.shown, self.retry_s, self._on_loss = url, without_password(url), retry_s, on_loss
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=retry_s,
            socket_connect_timeout=2.0,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
        self.client: Any = aioredis.Redis(connection_pool=pool)
        self._scripts: Mapping[str, AsyncScript] = {
            name: self.client.register_script(text)
            for name, text in vars(scripts).items()
            if name.isupper() and not name.startswith("_")
        }
        self._together = Together(self.client)
        self.losses = 0
        """How often a command found the server gone (a reader compares it to learn that a reply may be missing)."""

    async def script(self, name: str, keys: list[str], args: list[str | bytes | int | float]) -> Any:
        """Runs a script of :mod:`prism.store.scripts`."""
        return await self.run(lambda: self._together.call(self._scripts[name], keys, args))

    async def run(self, command: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``command()``, again and again while the server is away. Raises :class:`StoreUnavailable` after
        ``retry_s``, and at once when the server takes no writes; :class:`StoreRefused` when it does not accept the
        password."""
        give_up = time.monotonic() + self.retry_s
        pause_s = 0.01
        while True:
            try:
                return await command()
            except errors.AuthenticationError as error:
                raise StoreRefused(f"{self.shown} refuses the connection: {error}") from error
            except errors.ResponseError as error:
                if not is_unwilling(error):
                    raise
                raise StoreUnavailable(f"{self.shown} takes no writes: {error}") from error
            except LOST as error:
                self.lost()
                if time.monotonic() + pause_s > give_up:
                    raise StoreUnavailable(f"{self.shown} did not answer for {self.retry_s:g} s: {error}") from error
                log.debug("store away (%s), trying again in %.2f s", error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.5)

    def lost(self) -> None:
        """The server went away under a command."""
        self.losses += 1
        self._on_loss()

    async def aclose(self) -> None:
        await self.client.aclose()
        await self.client.connection_pool.disconnect()
