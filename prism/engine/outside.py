"""What a worker takes of its device beside pages (the driver's context, torch, graphs, workspaces): granted before it
is taken, and kept to; and how many parked workers a device bears, each of which has a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prism import memory
from prism.engine.options import PoolOptions

KEPT_FACTOR: Final = 2
"""A device keeps up to this many times its parked workers when models leave: with exactly as many as are kept ready,
each model that comes would cost a fork and each that leaves a kill."""


class OutsideMemory:
    """The grant of one worker. ``parked_bytes`` while it has no model, ``active_bytes`` while it has one."""

    def __init__(self, owner: memory.Owner, parked_bytes: int, active_bytes: int) -> None:
        self._owner, self._parked_bytes, self._active_bytes = owner, parked_bytes, active_bytes

    def park(self, kept_bytes: int = 0) -> None:
        """The worker has no model now, but ``kept_bytes`` of those it had. Raises
        :class:`prism.memory.errors.OutOfMemory` if it was granted nothing yet and there is no room."""
        self._set(self._parked_bytes + kept_bytes, 0.0)

    def activate(self, timeout_s: float) -> None:
        """The worker may take all that an engine takes. Raises :class:`prism.memory.errors.OutOfMemory` when
        neighbours, who feel pressure meanwhile, have not given way within ``timeout_s``."""
        self._set(self._active_bytes, timeout_s)

    @property
    def most_kept_bytes(self) -> int | None:
        """What a worker may keep of models it had: half of what torch may take, so that the next one has room. None:
        nobody counts."""
        return (self._active_bytes - self._parked_bytes) // 2 if self._active_bytes else None

    def _set(self, wanted_bytes: int, timeout_s: float) -> None:
        more_bytes = wanted_bytes - self._owner.held("outside")
        if more_bytes > 0:
            self._owner.reserve(more_bytes, "outside", timeout_s)
        elif more_bytes < 0:
            self._owner.release(-more_bytes, "outside")


def torch_share(parked_bytes: int, active_bytes: int, total_bytes: int) -> float:
    """The fraction of a GPU that torch may allocate (``torch.cuda.set_per_process_memory_fraction``): what an engine is
    granted without the context, which torch does not count."""
    return min(1.0, max(0, active_bytes - parked_bytes) / total_bytes)


def hold_torch_to(gpu: int, parked_bytes: int, active_bytes: int) -> None:
    """From now on torch raises its out-of-memory error rather than take more of GPU ``gpu`` than it was granted."""
    import torch

    total_bytes = int(torch.cuda.get_device_properties(gpu).total_memory)
    bound: Callable[[float, int], None] = torch.cuda.set_per_process_memory_fraction
    bound(torch_share(parked_bytes, active_bytes, total_bytes), gpu)


def most_parked(options: PoolOptions, free_bytes: int, wanted_bytes: int) -> int:
    """How many parked workers a device keeps. More than are to be ready only where each costs the device nothing, or
    nobody there waits for memory."""
    spare = options.parked_bytes == 0 or wanted_bytes <= free_bytes
    return options.parked_per_device * (KEPT_FACTOR if spare else 1)


def has_room_to_park(options: PoolOptions, free_bytes: int) -> bool:
    """Whether one more worker may be started without a model."""
    return free_bytes >= options.parked_bytes
