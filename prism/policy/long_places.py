"""Over which places the KV of a long prompt is dealt, so that it comes in at the sum of their rates. Pure.

A lender gives borrowers a small share of its memory's bandwidth, so that its own steps hardly suffer (AQUA, section 7:
5%). Who reads from one place after the other has one place's rate; who reads from several at once has their sum, and
none of them gives more than its share. Units are read in one order, so that places are dealt units in proportion to
their rates::

    order     1 2 3 4 5 6 7 8        a three times as fast as b, four units on their way at once
    place a   1 2 3   5 6 7
    place b         4       8
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

MOST_PLACES: Final = 3
"""That are read at once."""
AHEAD: Final = MOST_PLACES + 1
"""Units on their way at once, where there are several places. One more than places: while attention has a unit, the
next of its place is on its way."""
_ROUND: Final = 12
"""Units after which dealing begins anew."""


def places_for(rates: Sequence[float]) -> tuple[int, ...]:
    """Which of the places with these ``rates`` (bytes/s) are used, the fastest first: :data:`MOST_PLACES` at most, and
    none of less than a :data:`MOST_PLACES`-th of the fastest's rate: with few units on their way, all the others would
    wait for it. A rate of 0 is not known: then the first place alone. Empty: there is none."""
    if not all(rates):
        return (0,)
    order = sorted(range(len(rates)), key=lambda place: -rates[place])
    return tuple(place for place in order[:MOST_PLACES] if rates[place] * MOST_PLACES >= rates[order[0]])


def deal_round(rates: Sequence[float]) -> tuple[int, ...]:
    """The place of each unit of a round, by its number: each goes where it would have come in first, if every place had
    to bring all that it was dealt before. Empty: there is no place. See :func:`place_of`."""
    used = places_for(rates)
    if len(used) <= 1:
        return used
    dealt = dict.fromkeys(used, 0)
    found = []
    for _ in range(_ROUND):
        place = min(used, key=lambda place: (dealt[place] + 1) / rates[place])
        dealt[place] += 1
        found.append(place)
    return tuple(found)


def place_of(layer: int, piece: int, dealt: Sequence[T]) -> T:
    """Of a unit, by a round of :func:`deal_round`, or of what stands for its places. Layers begin at different places,
    since a short prompt has few pieces to a layer."""
    return dealt[(layer + piece) % len(dealt)]


def bytes_per_s(rates: Sequence[float]) -> float:
    """At which what is dealt comes in at the most; 0: not known."""
    dealt = deal_round(rates)
    if not dealt or not all(rates):
        return 0.0
    return len(dealt) / max(dealt.count(place) / rates[place] for place in set(dealt))
