"""Which of a model's queues takes a request: the least loaded one, whoever chooses.

Front doors choose for new requests, the controller for those that waited until their model was loaded, and the
simulator for both. A model with several instances has a queue per instance: the queue of its lead device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

QueueT = TypeVar("QueueT")

WAITING_WEIGHS: Final = 8
"""So many times more than one that runs a request counts that waits: where one waits there is no room for another, by
memory or by time, however few run there."""


def queue_load(unfinished: int, running: int | None) -> int:
    """Of a queue with so many ``unfinished`` requests, of which engines had ``running`` when that was told last; None:
    it never was, and all are taken for running."""
    waiting = 0 if running is None else max(0, unfinished - running)
    return unfinished + WAITING_WEIGHS * waiting


def least_loaded(queues: Iterable[QueueT], load_of: Callable[[QueueT], float]) -> QueueT:
    """The queue with the least load; the first of several. Raises :class:`ValueError` when there is none."""
    return min(queues, key=load_of)
