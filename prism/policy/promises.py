"""Whether a request may begin beside those that run: admission keeps the promises that it has made (not in the Prism
paper, whose admission looks at first tokens only).

Engines that decode at once slow each other down by the sum of their shares of the bandwidth
(:mod:`prism.policy.device_time`). Where that sum is more than the device has, one engine more finishes nothing sooner:
it only spreads the same tokens over more requests, until nobody's come in time. Three or more need not all be as slow
as that: who bears it stands still for the others (:mod:`prism.policy.pauses`), and what counts then is how much of the
device all of them need together. So a request waits while

- it would be too slow itself more likely than not, or more of those that are in time so far would be lost by it than it
  is worth, and
- it can wait: what is left of its time to the first token is longer than its prefill.

When it cannot wait any more it begins if more requests are expected to meet both objectives with it than without. One
that cannot be in time any more begins where it harms nobody. What steps will take is known to a part (what runs ends,
what comes is not known), so promises are kept with a chance, and numbers of requests are expected ones: to hold one for
sure so that others *might* be in time would lose more than it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prism.policy.device_time import slowdown
from prism.policy.pauses import may_matter

_LEAST_PART = 0.5
"""Of the time ahead an engine is there for such a part at least."""
_ODDS = math.log(1.1), 0.2
"""Of an estimate of steps: how much longer it is than what comes, and its spread; logarithms (docs/policies.md)."""
_TURNS_ODDS = 0.15, 0.2
"""The same of what engines need together that stand still for each other."""
_FEW = 4
"""An engine with promises to more cannot wait for others: one of its answers is always the last that may."""
_LEAST_TURN = 1.0 / 7.0
"""Whoever stands still runs for such a part of the time all the same, with the default ``longest_pause``."""
_LIKELY = 0.5
_HARMLESS = 0.05
"""Part of the promises that may be lost by one which nobody promised anything."""


class Decoder(NamedTuple):
    """An engine with requests on a device, as it is or would be."""

    share: float
    """Of the bandwidth, while it steps (0..1)."""
    bearable: float
    """How many times slower than alone its steps may be, on average, for what its requests have before them; infinite
    where nobody minds."""
    promised: int
    """Its requests that are in time so far."""
    rest_s: float
    """How long its requests are still expected to take."""
    lasts_s: float
    """How long it is expected to go on, requests to come included; at least ``rest_s``."""
    yields: bool = False
    """It is told to stand still for others where that helps."""


class Entrant(NamedTuple):
    """A request that might begin now."""

    engine: Decoder
    """Its engine with it."""
    was: Decoder | None
    """Its engine without it; None: it runs nothing."""
    gain: int
    """Requests that could be in time if it begins: itself and those that would follow it at once; 0: none could."""
    can_wait: bool
    followed: bool = True
    """Requests of other models wait as well: who ends early is often followed by another."""


def crowd_for(one: Decoder, others: Iterable[Decoder], least_part: float = _LEAST_PART) -> float:
    """How many times longer than alone the steps of ``one`` take beside ``others``, on average over the time that its
    requests are still there, of which each of these is there for ``least_part`` at least."""
    return slowdown(one.share + sum([d.share * _part(d.lasts_s / one.rest_s, least_part) for d in others]))


def _part(lasts: float, least: float) -> float:
    return min(1.0, least + (1.0 - least) * lasts)


def chance(one: Decoder, others: Sequence[Decoder], least_part: float = _LEAST_PART, *, turns: bool = False) -> float:
    """That its steps are as fast as they should be, beside ``others`` (0..1); ``turns``: or that it is in time because
    some stand still for others."""
    found = _odds(one.bearable / crowd_for(one, others, least_part), *_ODDS)
    if not turns or not one.yields or one.promised > _FEW:
        return found
    if not may_matter([one.share, *(d.share for d in others)]):
        return found  # nobody would stand still
    needed = _needs(one) + sum([_needs(d) * _part(d.lasts_s / one.rest_s, least_part) for d in others])
    return max(found, _odds(1.0 / needed, *_TURNS_ODDS))


def _odds(margin: float, longer: float, spread: float) -> float:
    if math.isinf(margin):
        return 1.0
    return 0.5 + 0.5 * math.erf((math.log(margin) + longer) / (spread * math.sqrt(2)))


def _needs(one: Decoder) -> float:
    """Part of the device's bandwidth that is enough for its answers to be in time."""
    return one.share * min(1.0, max(_LEAST_TURN, 1.0 / one.bearable)) if one.yields else one.share


def kept(decoders: Sequence[Decoder], least_part: float = _LEAST_PART, *, turns: bool = False) -> float:
    """Promises that are expected to be kept if all of them go on."""
    return sum(
        d.promised * chance(d, [o for o in decoders if o is not d], least_part, turns=turns)
        for d in decoders
        if d.promised
    )


def may_begin(entrant: Entrant, others: Sequence[Decoder]) -> bool:
    """Whether it begins beside ``others``, the engines that run something, without its own. One that cannot wait, on a
    device where only its model's requests do, is taken at the others' expected end: to hold it for their sake
    would lose it for certain.

    1. Nothing runs: it does, whatever comes of it.
    2. None could be in time by it: if it harms nobody, though nobody stood still.
    3. It cannot wait: if more requests are expected in time with it than without.
    4. It can wait: if it is likely in time now, and what is lost by that is less than itself.
    """
    if not others and entrant.was is None:  # 1
        return True
    least_part = _LEAST_PART if entrant.followed or entrant.can_wait else 0.0
    turns = bool(entrant.gain)
    own = chance(entrant.engine, others, least_part, turns=turns)
    before = kept(others if entrant.was is None else (*others, entrant.was), least_part, turns=turns)
    lost = before - kept((*others, entrant.engine), least_part, turns=turns)
    if not entrant.gain:  # 2
        return own >= _LIKELY and lost <= _HARMLESS * max(1.0, before)
    if not entrant.can_wait:  # 3
        return entrant.gain * own > lost
    return own >= _LIKELY and own >= lost  # 4
