"""Who is served at all when a fleet cannot serve everybody (not in the Prism paper, whose models all take their turn).

A decode step reads a model's weights whether it is for one request or for fifty, so that a request of a large model
that is hardly asked takes a hundred times as much of a device as one of a small popular model. Where both cannot be
served, what counts is how many requests a device serves in its time and its memory: models are taken in that order
until the fleet is full, as a knapsack is filled by value over weight, and the rest is turned away. Each of the two
uses weighs as much as it is overbooked; one of which there is enough costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.ids import ModelName

_STAYS: Final = 1.5
"""Who was served counts for so many times as much: a load is not made for a small gain, and rates are noisy."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A model that is asked, with what it would take of the fleet."""

    model: ModelName
    met_per_s: float
    """Requests per second that could meet their objectives."""
    devices: float
    """Bandwidth, of whole devices, over time."""
    memory_bytes: float
    """Weights, engines and KV, on all devices together."""
    served: bool
    """It was not turned away until now."""


@dataclass(frozen=True, slots=True)
class FleetRoom:
    """Of a fleet, for all its models together."""

    devices: float
    memory_bytes: float


def turned_away(applicants: Sequence[Applicant], room: FleetRoom, by_time: bool = True) -> frozenset[ModelName]:
    """The models that are not served; none where there is enough for all, or, unless ``by_time``, where there is memory
    enough. Those that are fit together, and none of the others would fit beside them. Where one use alone is overbooked
    and all were served, what is kept is worth at least the best choice less the most valuable model (the greedy bound
    of the knapsack)."""
    time_price = _price(sum(a.devices for a in applicants), room.devices)
    memory_price = _price(sum(a.memory_bytes for a in applicants), room.memory_bytes)
    if not memory_price and not (by_time and time_price):
        return frozenset()

    def density(one: Applicant) -> float:
        cost = time_price * one.devices + memory_price * one.memory_bytes
        return one.met_per_s * (_STAYS if one.served else 1.0) / cost if cost > 0.0 else float("inf")

    away: set[ModelName] = set()
    devices, left_bytes = room.devices, room.memory_bytes
    for one in sorted(applicants, key=lambda a: (-density(a), a.model)):
        if one.devices <= devices and one.memory_bytes <= left_bytes:
            devices, left_bytes = devices - one.devices, left_bytes - one.memory_bytes
        else:
            away.add(one.model)
    return frozenset(away)


def _price(asked: float, there: float) -> float:
    """Of one unit, in parts of all that there is, by how far it is overbooked."""
    if asked <= there:
        return 0.0
    return (asked - there) / (there * there) if there > 0.0 else 1e30
