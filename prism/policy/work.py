"""Placement by what models take of their devices' bandwidth and KV memory, beside their weights.

Prism's KVPR (section 6.2) weighs request rates over memory; two models that decode all day on one GPU slow each other
down whatever the memory. Here a device has two uses, each about 1 when it is just full::

    work = sum over models of (share of the time in which it runs) * (share of the bandwidth it takes then)
    kv   = (KV bytes that its models' requests hold) / (memory beside their weights)
    load = work ** 2 + kv ** 2

Squares, so that the sum over devices falls when load is spread, by either use, and more the fuller one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prism.core.ids import DeviceId, ModelName
from prism.policy.pressure import Floats


@dataclass(frozen=True, slots=True)
class ShardDemand:
    """What one shard of a model brings to a device."""

    work: float
    kv_bytes: float
    weight_bytes: int
    """In whole pages."""


@dataclass(frozen=True, slots=True)
class Site:
    """One device as it is."""

    id: DeviceId
    work: float
    kv_bytes: float
    shared_bytes: float
    """Memory beside the weights."""

    @property
    def load(self) -> float:
        """See the module; infinite where weights leave nothing."""
        if self.shared_bytes <= 0.0:
            return float("inf")
        kv = self.kv_bytes / self.shared_bytes
        return self.work * self.work + kv * kv

    def plus(self, demand: ShardDemand) -> Site:
        """With a shard more."""
        return Site(
            self.id,
            self.work + demand.work,
            self.kv_bytes + demand.kv_bytes,
            self.shared_bytes - demand.weight_bytes,
        )

    def minus(self, demand: ShardDemand) -> Site:
        """With a shard less."""
        return Site(
            self.id,
            max(0.0, self.work - demand.work),
            max(0.0, self.kv_bytes - demand.kv_bytes),
            self.shared_bytes + demand.weight_bytes,
        )


def loads_with(demand: ShardDemand, work: Floats, kv_bytes: Floats, shared_bytes: Floats) -> Floats:
    """By how much the load of every device would grow with a shard more: :class:`Site` over all devices at once."""
    kv_now, kv_then = (
        _share(kv_bytes, shared_bytes),
        _share(kv_bytes + demand.kv_bytes, shared_bytes - demand.weight_bytes),
    )
    with np.errstate(invalid="ignore"):
        grown: Floats = (work + demand.work) ** 2 - work**2 + kv_then**2 - kv_now**2
    grown[~np.isfinite(grown)] = np.inf
    return grown


def _share(kv_bytes: Floats, shared_bytes: Floats) -> Floats:
    result = np.full(len(kv_bytes), np.inf)
    np.divide(kv_bytes, shared_bytes, out=result, where=shared_bytes > 0)
    return result


@dataclass(frozen=True, slots=True)
class MovableModel:
    """A model that may leave its device for another one."""

    model: ModelName
    demand: ShardDemand


@dataclass(frozen=True, slots=True)
class Relief:
    """A move of ``goes`` to ``to``, or, with ``comes``, an exchange; ``gain`` is what the sum of loads falls by."""

    goes: ModelName
    to: DeviceId
    gain: float
    comes: ModelName | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A device to which models of another one might go."""

    site: Site
    room_bytes: float
    """Without anybody leaving."""
    tenants: tuple[MovableModel, ...]
    """Who might come in exchange."""


def best_relief(
    here: Neighbour, others: Sequence[Neighbour], need_bytes: Mapping[ModelName, int], price: float
) -> Relief | None:
    """What relieves ``here`` most: the move of one of its tenants to one of ``others``; where no move gains more than
    ``price``, the exchange of two that gains more than twice as much. All of what comes must fit before anything
    leaves. ``need_bytes``: room that a tenant needs.

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
    for tenant in here.tenants:
        left = here.site.load - here.site.minus(tenant.demand).load
        for other in others:
            if other.room_bytes >= need_bytes[tenant.model]:
                gain = left + other.site.load - other.site.plus(tenant.demand).load
                yield Relief(tenant.model, other.site.id, gain)


def _exchanges(here: Neighbour, others: Sequence[Neighbour], need_bytes: Mapping[ModelName, int]) -> Iterator[Relief]:
    for goes in here.tenants:
        for other in others:
            if other.room_bytes < need_bytes[goes.model]:
                continue
            before = here.site.load + other.site.load
            for comes in other.tenants:
                if here.room_bytes >= need_bytes[comes.model]:
                    here_then = here.site.minus(goes.demand).plus(comes.demand)
                    there_then = other.site.minus(comes.demand).plus(goes.demand)
                    yield Relief(goes.model, other.site.id, before - here_then.load - there_then.load, comes.model)
