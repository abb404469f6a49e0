"""How many requests per second get their tokens in time on a device, given who shares it: what places and moves are
judged by (not in the Prism paper, whose KVPR weighs request rates over memory).

Engines that decode at the same time slow each other down by the sum of their shares of the bandwidth
(:mod:`prism.policy.device_time`). A model's requests are in time while that sum stays within what its objective
leaves::

    sum = own share + sum over the other models of (share, while it decodes: a part ``duty`` of the time)
    met = requests/s * P(sum <= bearable) * P(KV of all within the memory beside their weights)

Models are taken to decode independently of each other, and their sum to be normal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prism.core.ids import DeviceId, ModelName

_UNSURE: Final = 0.15
"""Standard deviation of what is not known of a sum of shares."""
_KV_FULL, _KV_UNSURE = 0.9, 0.15
"""Mean KV of such a share of the memory is too much half of the time; and by how much that is uncertain."""


class SharingModel(NamedTuple):
    """A model's shard on a device, as it is expected to be for some time."""

    model: ModelName
    rate_per_s: float
    """Requests of the instance."""
    duty: float
    """Part (0..1) of the time in which it decodes."""
    share: float
    """Of the bandwidth, while it decodes (0..1)."""
    bearable: float
    """How many times slower than alone its steps may be; below 1 it misses its objective alone."""
    kv_bytes: float
    """Of its requests, on average."""
    weight_bytes: int
    """In whole pages, its engine included."""


class Site(NamedTuple):
    """A device with those who share it."""

    id: DeviceId
    memory_bytes: float
    tenants: tuple[SharingModel, ...]

    def plus(self, tenant: SharingModel) -> Site:
        return Site(self.id, self.memory_bytes, (*self.tenants, tenant))

    def minus(self, model: ModelName) -> Site:
        return Site(self.id, self.memory_bytes, tuple(t for t in self.tenants if t.model != model))

    @property
    def met_per_s(self) -> float:
        """See the module."""
        return met_per_s(self.tenants, self.memory_bytes)

    @property
    def admitted_per_s(self) -> float:
        """See :func:`admitted_per_s`."""
        return admitted_per_s(self.tenants, self.memory_bytes)


def met_per_s(tenants: Sequence[SharingModel], memory_bytes: float) -> float:
    """Requests per second that meet their objectives for a token's time; see the module."""
    mean = sum(t.duty * t.share for t in tenants)
    variance = sum(t.duty * (1.0 - t.duty) * t.share * t.share for t in tenants)
    met = 0.0
    for t in tenants:
        if t.bearable < 1.0:
            continue  # it misses alone: nothing that others do changes that
        crowd = mean + (1.0 - t.duty) * t.share
        spread = math.sqrt(max(0.0, variance - t.duty * (1.0 - t.duty) * t.share * t.share) + _UNSURE * _UNSURE)
        met += t.rate_per_s * _normal((t.bearable - crowd) / spread)
    return met * _kv_has_room(tenants, memory_bytes) if met else 0.0


_COUNTED: Final = 8
"""Most models of a device of which all sets are looked at, the busiest ones."""
_LEAST_DUTY, _MOST_DUTY = 0.1, 0.98


def admitted_per_s(tenants: Sequence[SharingModel], memory_bytes: float) -> float:
    """As :func:`met_per_s` where the device holds back those for whom it has no bandwidth
    (:mod:`prism.policy.promises`): where too many would decode at once not everybody is late, but those are who wait.

    Of every set of models that may want to decode at the same time the part counts that meets most; each wants to for a
    part ``duty`` of the time, independently of the others. Takes time exponential in the number of models, up to
    ``_COUNTED``.
    """
    asked = sorted((t for t in tenants if t.rate_per_s > 0.0), key=lambda t: -t.duty)[:_COUNTED]
    crowds, chances = [0.0], [1.0]
    for t in asked:
        duty = min(_MOST_DUTY, max(_LEAST_DUTY, t.duty))
        crowds += [crowd + t.share for crowd in crowds]
        chances = [c * (1.0 - duty) for c in chances] + [c * duty for c in chances]
    best = [0.0]
    for wanting in range(1, len(crowds)):
        members = [i for i in range(len(asked)) if wanting >> i & 1]
        everybody = sum(_met_in(asked[i], crowds[wanting]) for i in members)
        best.append(max(everybody, *(best[wanting & ~(1 << i)] for i in members)))
    return math.fsum(map(operator.mul, chances, best)) * _kv_has_room(tenants, memory_bytes)


def _met_in(t: SharingModel, crowd: float) -> float:
    """Of its requests per second while it decodes, among shares that add up to ``crowd`` with its own."""
    if t.bearable < 1.0:
        return 0.0
    return t.rate_per_s / max(_LEAST_DUTY, t.duty) * _normal((t.bearable - crowd) / _UNSURE)


def _kv_has_room(tenants: Iterable[SharingModel], memory_bytes: float) -> float:
    return _normal((_KV_FULL - _kv_share(tenants, memory_bytes)) / _KV_UNSURE)


def _kv_share(tenants: Iterable[SharingModel], memory_bytes: float) -> float:
    held, left = 0.0, memory_bytes
    for t in tenants:
        held, left = held + t.kv_bytes, left - t.weight_bytes
    return held / left if left > 0.0 else float("inf")


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
