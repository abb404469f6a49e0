"""Freed slots on their way to the host: their numbers lie on the device, and reading them there waits for its step.

With overlap SGLang frees slots while the device computes the next step. A copy is begun instead, and the slots are free
when it has arrived::

    results of step n are processed     free() --> copy begun ... arrived --> pool.free, before a later step
    step n + 2 is scheduled             free() --> pool.free at once: evictions and retractions count on it

Until then they count as used, so what the lease promises stays true; who lacks memory waits for them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from prism import memory


class SlotReturns:
    """The freed slots of one pool. Not thread-safe: the scheduler's thread only."""

    def __init__(self, pool: memory.Pool) -> None:
        self._pool = pool
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()
        """Copies on the host, and the event behind each."""
        self.defer = False
        """Whether slots that are freed now may come later."""

    @property
    def coming(self) -> int:
        """Slots that are freed and still count as used."""
        return sum(slots.numel() for slots, _ in self._coming)

    def free(self, slots: torch.Tensor) -> None:
        """``slots`` [n] are nobody's any more; they may lie on the device."""
        if self.defer:
            self._coming.append(begin_copy(slots))
        else:
            self._pool.free(slots.to("cpu", torch.int64))

    def settle(self, *, wait: bool = False) -> None:
        """Give the pool the slots whose numbers have arrived; with ``wait`` all of them."""
        while self._coming:
            slots, arrived = self._coming[0]
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                return
            self._coming.popleft()
            self._pool.free(slots.to(torch.int64))

    def forget(self) -> None:
        """All slots of the pool were taken back at once."""
        self._coming.clear()


def begin_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy of ``tensor`` in host memory, and the event after which it is complete."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)
    arrived = torch.get_device_module(tensor.device).Event()
    arrived.record()
    return copy, arrived


def to_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """``tensor`` of the host on ``device``, without waiting for what the device computes."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
