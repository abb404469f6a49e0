"""How a device on which requests miss is relieved best: by one move, by an exchange of two models, or, where there is
no room for that, by an exchange for which one leaves first and is away until the other has moved. Judged by the
requests that meet their objectives then (:mod:`prism.policy.goodput`; not in the Prism paper, whose migration moves one
model at a time into free room)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prism.core.ids import DeviceId, ModelName
from prism.policy.goodput import SharingModel, Site


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
    away: ModelName | None = None
    """Of an exchange without free room: the one that leaves first, for the other's new instance, and is loaded when the
    other's old one has left."""


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

    def fits(other: Neighbour, goes: SharingModel, comes: SharingModel) -> bool:
        return other.room_bytes >= need_bytes[goes.model] and here.room_bytes >= need_bytes[comes.model]

    best = max(_exchanges(here, others, fits), key=_gain, default=None)
    return best if best is not None and best.gain > 2.0 * price else None


def best_in_turn(
    here: Neighbour,
    others: Sequence[Neighbour],
    need_bytes: Mapping[ModelName, int],
    room_without: Mapping[ModelName, float],
    price: float,
    away_share: float,
) -> Relief | None:
    """The exchange that relieves ``here`` most where there is no room for both: the one that is asked less is away. It
    must gain more than twice ``price`` and what is asked of that one in ``away_share`` of the time. ``room_without``:
    what a model's device has once it has left.

    None: nothing pays. Ties go to the first found.
    """
    rates = {t.model: t.rate_per_s for n in (here, *others) for t in n.movable}

    def fits(_: Neighbour, goes: SharingModel, comes: SharingModel) -> bool:
        there, back = room_without[comes.model], room_without[goes.model]
        return there >= need_bytes[goes.model] and back >= need_bytes[comes.model]

    best: tuple[float, Relief] | None = None
    for found in _exchanges(here, others, fits):
        assert found.comes is not None
        away = min(found.comes, found.goes, key=lambda name: rates[name])
        left = found.gain - away_share * rates[away]
        if left > 2.0 * price and (best is None or left > best[0]):
            best = left, replace(found, away=away)
    return None if best is None else best[1]


def admitted_gain(here: Site, there: Site, relief: Relief) -> float:
    """Requests per second that a move or exchange between ``here`` and ``there`` gains where devices hold back those
    for whom they have no bandwidth: who is held back gains nothing where it would be held back as well, and who is
    served loses by going there."""
    goes = next(t for t in here.tenants if t.model == relief.goes)
    here_then, there_then = here.minus(goes.model), there.plus(goes)
    if relief.comes is not None:
        comes = next(t for t in there.tenants if t.model == relief.comes)
        here_then, there_then = here_then.plus(comes), there_then.minus(comes.model)
    before = here.admitted_per_s + there.admitted_per_s
    return here_then.admitted_per_s + there_then.admitted_per_s - before


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


def _exchanges(
    here: Neighbour, others: Sequence[Neighbour], fits: Callable[[Neighbour, SharingModel, SharingModel], bool]
) -> Iterator[Relief]:
    met_here = here.site.met_per_s
    for other in others:
        before = met_here + other.site.met_per_s
        for goes in here.movable:
            for comes in other.movable:
                if fits(other, goes, comes):
                    here_then = here.site.minus(goes.model).plus(comes)
                    there_then = other.site.minus(comes.model).plus(goes)
                    gain = here_then.met_per_s + there_then.met_per_s - before
                    yield Relief(goes.model, other.site.id, gain, comes.model)
