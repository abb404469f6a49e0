"""How loaded devices are by what models take of their bandwidth and KV memory, beside their weights: where it is worth
looking for a place (:mod:`prism.policy.goodput` weighs those few).

A device has two uses, each about 1 when it is just full::

    work = sum over models of (share of the time in which it runs) * (share of the bandwidth it takes then)
    kv   = (KV bytes that its models' requests hold) / (memory beside their weights)
    load = work ** 2 + kv ** 2

Squares, so that the sum over devices falls when load is spread, by either use, and more the fuller one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism.policy.pressure import Floats


@dataclass(frozen=True, slots=True)
class ShardDemand:
    """What one shard of a model brings to a device."""

    work: float
    kv_bytes: float
    weight_bytes: int
    """In whole pages."""


def loads_with(demand: ShardDemand, work: Floats, kv_bytes: Floats, shared_bytes: Floats) -> Floats:
    """By how much the load of every device would grow with a shard more; infinite where weights leave nothing."""
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
