"""Work that blocks for long keeps nothing else from running."""

from __future__ import annotations

import asyncio
import threading

import pytest

from prism.node.threads import in_own_thread
from tests.patience import PATIENCE_S


async def test_many_that_wait_leave_room_for_others() -> None:
    over = threading.Event()
    waiting = [asyncio.create_task(in_own_thread(over.wait, PATIENCE_S)) for _ in range(64)]
    try:
        assert await in_own_thread(lambda: 7) == 7
        assert await asyncio.to_thread(lambda: 8) == 8
    finally:
        over.set()
    assert await asyncio.gather(*waiting) == [True] * 64


async def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)
