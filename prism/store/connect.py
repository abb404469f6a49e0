"""Opens the store behind an address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from prism.store.interface import Store
from prism.store.memory import MemoryStore
from prism.store.redis import RedisStore
from prism.store.values import StoreRefused, StoreUnavailable

REACH_S: Final = 10.0
"""How long who starts waits for a store's first answer: on a busy machine one that is well takes seconds."""
_PAUSE_S: Final = 0.1


def open_store(url: str, *, retry_s: float = 30.0, on_loss: Callable[[], None] = lambda: None) -> Store:
    """``memory://`` is private to the process; ``unix:///PATH``, ``redis://``, ``rediss://`` reach a server, which need
    not be up yet: each call waits for it up to ``retry_s`` and ``on_loss`` is called for
    each command that has to be repeated. Raises :class:`prism.core.errors.InvalidValue` on another
    scheme."""
    if url == "memory://":
        return MemoryStore()
    return RedisStore(url, retry_s=retry_s, on_loss=on_loss)


async def reach(store: Store, within_s: float = REACH_S) -> None:
    """Returns at the store's first answer. Raises :class:`StoreUnavailable` when none has come after ``within_s``,
    :class:`StoreRefused` at once."""
    give_up_s = time.monotonic() + within_s
    while True:
        try:
            return await store.ping()
        except StoreUnavailable:
            if time.monotonic() >= give_up_s:
                raise
        await asyncio.sleep(_PAUSE_S)


async def lets_everybody_in(url: str) -> bool:
    """Whether the server at ``url``, on the network, answers without a password. Raises :class:`StoreUnavailable`."""
    if url.startswith(("unix:", "memory:")):
        return False
    parts = urlsplit(url)
    store = open_store(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
    try:
        await reach(store)
    except StoreRefused:
        return False
    finally:
        await store.aclose()
    return True
