"""The lanes of :mod:`prism.weights.loading.gpu_loader` where the device is a part of host memory: copies that keep to
the rates declared of its links, so that a virtual device loads as a GPU does, only slower."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism.kv.pacing import LinkPace
from prism.memory import stream_copy


class HostLane:
    """Host memory to a virtual device. Lanes with the same ``pace`` share its link."""

    def __init__(self, pace: LinkPace, buffer_bytes: int) -> None:
        self._pace = pace
        self._memory = [np.empty(buffer_bytes, dtype=np.uint8) for _ in range(2)]
        self._sent: dict[int, tuple[int, float]] = {}
        self.buffers: Sequence[int] = [int(memory.ctypes.data) for memory in self._memory]

    def send(self, buffer: int, target: int, nbytes: int) -> None:
        self._sent[buffer] = (nbytes, self._pace.begin())
        stream_copy(target, self.buffers[buffer], nbytes)

    def wait(self, buffer: int) -> None:
        if (sent := self._sent.pop(buffer, None)) is not None:
            self._pace.copied(*sent)

    def settle(self) -> None:
        self._sent.clear()


class HostPeer:
    """A virtual device's memory to another's."""

    def __init__(self, pace: LinkPace) -> None:
        self._pace = pace

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Returns when the bytes are there."""
        began_s = self._pace.begin()
        stream_copy(target, source, nbytes)
        self._pace.copied(nbytes, began_s)
