"""Whose weights should give way to a neighbour's KV although they are in use (not in the Prism paper, which drives out
idle models only).

Where requests wait for memory, the weights of a model with few requests stand where the KV of many could be. Engines
run as many requests as they have memory for, so what a model's leaving is worth is counted in requests: those that
would run in the memory it frees, each with as much KV as those that run now have, against its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.instances import InstanceKey

_OUTWEIGHED: Final = 4.0
"""So many requests must be able to run for each that loses its place: it has to be loaded again elsewhere, if it finds
room at all."""


@dataclass(frozen=True, slots=True)
class KvTenant:
    """An instance on a device where requests wait for memory."""

    key: InstanceKey
    running: int
    waiting: int
    kv_bytes: int
    """Of its running requests, on this device."""
    frees_bytes: int
    """What the device has more without it."""
    may_leave: bool


@dataclass(frozen=True, slots=True)
class GivesWay:
    """``key`` leaves; ``more`` requests of ``to`` can run then."""

    key: InstanceKey
    to: InstanceKey
    more: float


def outweighed(tenants: Sequence[KvTenant]) -> GivesWay | None:
    """Who leaves for the neighbour with most requests waiting, if anybody should: of those that may, the one with the
    fewest requests for each that could run in its place, and only if these are several times as many.

    None: nobody. Ties go to the first.
    """
    hungry = max((t for t in tenants if t.running and t.kv_bytes > 0), key=lambda t: t.waiting, default=None)
    if hungry is None or not hungry.waiting:
        return None
    best: tuple[float, GivesWay] | None = None
    for tenant in tenants:
        if tenant is hungry or not tenant.may_leave:
            continue
        more = min(float(hungry.waiting), tenant.frees_bytes * hungry.running / hungry.kv_bytes)
        times = more / max(1, tenant.running + tenant.waiting)
        if times > _OUTWEIGHED and (best is None or times > best[0]):
            best = times, GivesWay(tenant.key, hungry.key, more)
    return None if best is None else best[1]
