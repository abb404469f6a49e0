"""Blocking work that may take long, beside an agent's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns or raises. ``asyncio.to_thread`` has a handful of threads for all: work that waits for
    others, such as for weights that arrive, would keep everything else from running."""
    pool = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: work(*args, **kwargs))
    finally:
        pool.shutdown(wait=False)
