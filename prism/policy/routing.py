"""Which of a model's queues takes a request: the least loaded one, whoever chooses.

Front doors choose for new requests, the controller for those that waited until their model was loaded, and the
simulator for both. A model with several instances has a queue per instance: the queue of its lead device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prism.core.ids import DeviceId

QueueT = TypeVar("QueueT")


def least_loaded(queues: Iterable[QueueT], load_of: Callable[[QueueT], float]) -> QueueT:
    """The queue with the least load; the first of several. Raises :class:`ValueError` when there is none."""
    return min(queues, key=load_of)


class QueueLoads:
    """Unfinished requests in every device's queue, as one sender knows them: what was measured last, and what this
    sender has put there since. Others' requests are seen with the next measurement."""

    def __init__(self) -> None:
        self._measured: dict[DeviceId, int] = {}
        self._sent: Counter[DeviceId] = Counter()

    def measured(self, device: DeviceId, requests: int) -> None:
        """``requests`` stand in the device's queue now, those sent so far among them."""
        self._measured[device] = requests
        del self._sent[device]

    def measured_all(self, requests: Mapping[DeviceId, int]) -> None:
        """The same for all devices at one time; what is not named is forgotten."""
        self._measured = dict(requests)
        self._sent.clear()

    def load_of(self, device: DeviceId) -> int:
        """Requests that are believed to stand in the device's queue; 0 for a device that was never measured."""
        return self._measured.get(device, 0) + self._sent[device]

    def assign_request(self, devices: Sequence[DeviceId]) -> DeviceId:
        """The least loaded of ``devices`` (at least one); it counts as having one request more from now on."""
        device = least_loaded(devices, self.load_of)
        self._sent[device] += 1
        return device

    @property
    def total(self) -> int:
        """Over all devices."""
        return sum(self._measured.values()) + self._sent.total()

    @property
    def all_empty(self) -> bool:
        """Whether no request is believed to stand anywhere."""
        return not any(self._measured.values()) and not self._sent.total()
