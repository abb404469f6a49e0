"""The store in one process's memory: for tests, the fake engine and trials. Nothing survives the process."""

from __future__ import annotations

import time
from collections.abc import Callable

from prism.store.memory_queues import MemoryQueues
from prism.store.memory_state import MemoryState


class MemoryStore(MemoryQueues, MemoryState):
    """Implements :class:`prism.store.interface.Store`; all clients share the object, told apart by their consumer
    names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        MemoryQueues.__init__(self, clock)
        MemoryState.__init__(self, clock)

    async def ping(self) -> None:
        return None

    async def aclose(self) -> None:
        return None
