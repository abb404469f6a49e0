"""A parked worker's time for others: it helps loads on other devices (:mod:`prism.weights.loading`).

It listens while it is parked and not while it has a model. Its pool, its device's memory and its own next activation
come first: it withdraws at once.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prism import memory
from prism.kv.settings import DeclaredLinks
from prism.weights.loading.gpu_loader import Lane
from prism.weights.loading.help_server import help_load
from prism.weights.loading.help_wire import packet_socket
from prism.weights.loading.links import device_lanes

log = logging.getLogger(__name__)

_WAITING: Final = 4
"""Loads that may wait for this worker; they give up on it by themselves."""


class HelpDesk:
    """``gpu`` None: a virtual device, whose link has the rate that ``declared`` says."""

    def __init__(
        self,
        path: Path,
        device: memory.Device,
        owner: memory.Owner,
        gpu: int | None,
        declared: Callable[[], DeclaredLinks],
    ) -> None:
        self._path, self._device, self._owner, self._gpu, self._declared = path, device, owner, gpu, declared
        self._listening: socket.socket | None = None

    def open(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listening = packet_socket()
        self._listening.bind(str(self._path))
        self._listening.listen(_WAITING)

    def close(self) -> None:
        """Nobody is helped any more; who asks is refused by the system."""
        self._path.unlink(missing_ok=True)
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def wait(self, channel: int) -> None:
        """Returns when the descriptor ``channel`` is readable; helps until then."""
        assert self._listening is not None
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        poller.register(self._listening, select.POLLIN)
        while channel not in {descriptor for descriptor, _ in poller.poll()}:
            load, _ = self._listening.accept()
            with load:
                staged = help_load(load, self._owner, self._lanes, self._why_leave, [channel])
            log.info("helped to load %d bytes", staged)

    def _lanes(self, buffer_bytes: int) -> list[Lane]:
        return list(device_lanes(self._gpu, self._declared().host, buffer_bytes))

    def _why_leave(self) -> str:
        wanted = self._device.wanted_bytes() > 0 or self._owner.pressure() > 0
        return f"the memory of {self._device.name} is wanted" if wanted else ""
