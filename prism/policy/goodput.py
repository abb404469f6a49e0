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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.ids import DeviceId, ModelName

_UNSURE: Final = 0.15
"""Standard deviation of what is not known of a sum of shares."""
_KV_FULL, _KV_UNSURE = 0.9, 0.15
"""Mean KV of such a share of the memory is too much half of the time; and by how much that is uncertain."""


@dataclass(frozen=True, slots=True)
class SharingModel:
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


@dataclass(frozen=True, slots=True)
class Site:
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
    return met * _normal((_KV_FULL - _kv_share(tenants, memory_bytes)) / _KV_UNSURE) if met else 0.0


def _kv_share(tenants: Iterable[SharingModel], memory_bytes: float) -> float:
    held, left = 0.0, memory_bytes
    for t in tenants:
        held, left = held + t.kv_bytes, left - t.weight_bytes
    return held / left if left > 0.0 else float("inf")


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A device to which models of another one might go."""

    site: Site
    room_bytes: float
    """Without anybody leaving."""
    movable: tuple[SharingModel, ...]
    """Who might come in exchange."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A move of ``goes`` to ``to``, or, with ``comes``, an exchange; ``gain``: so many requests per second more meet
    their objectives."""

    goes: ModelName
    to: DeviceId
    gain: float
    comes: ModelName | None = None


def best_relief(
    here: Neighbour, others: Sequence[Neighbour], need_bytes: Mapping[ModelName, int], price: float
) -> Relief | None:
    """What relieves ``here`` most: the move of one of its ``movable`` to one of ``others``; where no move gains more
    than ``price``, the exchange of two that gains more than twice as much. All of what comes must fit before anything
    leaves. ``need_bytes``: room that a model needs.

    None: nothing pays. Ties go to the first found.
    """
    best = max(_moves(here, others, need_bytes), key=_gain, default=None)
    if best is not None and best.gain > price:
        return best
    best = max(_exchanges(here, others, need_bytes), key=_gain, default=None)
    return best if best is not None and best.gain > 2.0 * price else None


def _gain(relief: Relief) -> float:
    return relief.gain


def _moves(here: Neighbour, others: Sequence[Neighbour], need_bytes: Mapping[ModelName, int]) -> Iterator[Relief]:
    met_here = here.site.met_per_s
    met_there = [other.site.met_per_s for other in others]
    for tenant in here.movable:
        left = here.site.minus(tenant.model).met_per_s - met_here
        for other, met in zip(others, met_there, strict=True):
            if other.room_bytes >= need_bytes[tenant.model]:
                gain = left + other.site.plus(tenant).met_per_s - met
                yield Relief(tenant.model, other.site.id, gain)


def _exchanges(here: Neighbour, others: Sequence[Neighbour], need_bytes: Mapping[ModelName, int]) -> Iterator[Relief]:
    met_here = here.site.met_per_s
    for other in others:
        before = met_here + other.site.met_per_s
        for goes in here.movable:
            if other.room_bytes < need_bytes[goes.model]:
                continue
            for comes in other.movable:
                if here.room_bytes >= need_bytes[comes.model]:
                    here_then = here.site.minus(goes.model).plus(comes)
                    there_then = other.site.minus(comes.model).plus(goes)
                    gain = here_then.met_per_s + there_then.met_per_s - before
                    yield Relief(goes.model, other.site.id, gain, comes.model)
