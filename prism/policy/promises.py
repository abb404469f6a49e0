"""Whether a request may begin beside those that run: admission keeps the promises that it has made (not in the Prism
paper, whose admission looks at first tokens only).

Engines that decode at once slow each other down by the sum of their shares of the bandwidth
(:mod:`prism.policy.device_time`). Where that sum is more than the device has, one engine more finishes nothing sooner:
it only spreads the same tokens over more requests, until nobody's come in time. So a request waits while

- it would make those slow that are in time so far, or be slow itself, and
- it can wait: what is left of its time to the first token is longer than its prefill.

When it cannot wait any more it begins if that lets more requests meet both objectives than it lets miss them. One that
cannot be in time any more begins where it harms nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prism.policy.device_time import slowdown

_LEAST_PART = 0.5
"""Of the time ahead an engine is there for such a part at least."""


@dataclass(frozen=True, slots=True)
class Decoder:
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


@dataclass(frozen=True, slots=True)
class Entrant:
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


def kept(decoders: Sequence[Decoder], least_part: float = _LEAST_PART) -> int:
    """Promises that are kept if all of them go on."""
    count = 0
    for one in decoders:
        if one.promised and one.bearable >= crowd_for(one, [d for d in decoders if d is not one], least_part):
            count += one.promised
    return count


def may_begin(entrant: Entrant, others: Sequence[Decoder]) -> bool:
    """Whether it begins beside ``others``, the engines that run something, without its own. One that cannot wait, on a
    device where only its model's requests do, is taken at the others' expected end: to hold it for their sake
    would lose it for certain.

    1. Nothing runs: it does, whatever comes of it.
    2. It would be too slow itself: it does not.
    3. It breaks no promise: it does.
    4. It can wait, or is too late anyway: it does not.
    5. Else by number: if more requests are in time with it than without.
    """
    if not others and entrant.was is None:  # 1
        return True
    least_part = _LEAST_PART if entrant.followed or entrant.can_wait else 0.0
    if entrant.engine.bearable < crowd_for(entrant.engine, others, least_part):  # 2
        return False
    before = kept(others if entrant.was is None else (*others, entrant.was), least_part)
    after = kept((*others, entrant.engine), least_part)
    if after >= before:  # 3
        return True
    return not entrant.can_wait and after + entrant.gain > before  # 4, 5
