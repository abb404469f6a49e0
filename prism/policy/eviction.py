"""Which idle models leave a device when another needs the memory (Prism, section 6.2; ALGORITHMS section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prism.core.instances import InstanceKey
from prism.core.settings import EvictionOrder


class EvictionCandidate(NamedTuple):
    """An instance that may leave. Pinned ones and ones that have not served never become one."""

    key: InstanceKey
    frees_bytes: int
    """Memory its leaving gives back on the device in question: weights and promised KV."""
    idle_s: float
    slo_ttft_s: float
    expected_remaining_s: float
    """How much longer it will stay idle, on average."""
    activation_s: float
    """What bringing it back takes."""
    in_use: bool = False
    """It has requests: leaves only for a model that reached its starvation bound."""
    requests: int = 0
    """Requests that it has."""
    coming: float = 0.0
    """Requests that will come for one in use until it could be back; 0: not looked at."""
    leaving: bool = False
    """It is on its way out already: counting on its memory costs nothing."""
    spare: bool = False
    """Its model serves on without it, on other devices."""

    @property
    def costs_nothing(self) -> bool:
        """Nobody misses it: it leaves anyway, or it is a spare instance without requests."""
        return self.leaving or (self.spare and not self.requests)

    @property
    def regret(self) -> float:
        """Expected cost per second of having evicted it: late tokens for its requests (the next one, when it is idle),
        in units of its objective, over the time until that happens. None for one that nobody misses."""
        if self.costs_nothing:
            return 0.0
        harm = (self.activation_s / self.slo_ttft_s) * max(1, self.requests)
        if self.coming:  # where not everybody can be served, every request counts alike
            harm = self.requests + self.coming
        return harm / max(self.expected_remaining_s, 1e-3)


_LEAST_TRUST = 0.05
_FORGIVEN_S = 300.0
"""In this time half of what is missing of full trust comes back."""


def trust_after(trust: float, expected_s: float, away_s: float) -> float:
    """How far what is expected of a model's idleness is believed (0..1, at first 1), after it was driven out because it
    was expected to stay idle for ``expected_s`` and was back after ``away_s``: half from before, half from this time.
    What comes back within seconds is soon dear to drive out, whatever its longer pauses were."""
    kept = 1.0 if expected_s <= 0.0 else min(1.0, away_s / expected_s)
    return max(_LEAST_TRUST, 0.5 * trust + 0.5 * kept)


def recovered_trust(trust: float, since_s: float) -> float:
    """:func:`trust_after` once ``since_s`` have passed without another lesson."""
    return float(1.0 - (1.0 - trust) * 0.5 ** (since_s / _FORGIVEN_S))


def choose_evictions(
    candidates: Sequence[EvictionCandidate], need_bytes: int, order: EvictionOrder
) -> tuple[EvictionCandidate, ...] | None:
    """Fewest-regret candidates whose leaving frees ``need_bytes``, in the order in which they should go.

    1. Nothing is needed: nobody.
    2. Candidates are taken by rank until they free enough: those that leave anyway first, then spare ones without
       requests, idle ones before those in use; among these ``paper`` takes larger SLOs first, then longer idle ones,
       ``expected_idle`` the least regret per byte.
    3. Of those taken, whoever turns out not to be needed stays, the dearest first.
    4. All together do not free enough: None.
    """
    return choose_from_ranked(ranked(candidates, order), need_bytes)


def ranked(candidates: Sequence[EvictionCandidate], order: EvictionOrder) -> list[EvictionCandidate]:
    """``candidates`` in the order in which they should be chosen."""
    if len(candidates) < 2:
        return list(candidates)
    return sorted(candidates, key=lambda c: _rank(c, order))


def choose_from_ranked(
    candidates: Sequence[EvictionCandidate], need_bytes: int
) -> tuple[EvictionCandidate, ...] | None:
    """:func:`choose_evictions` of candidates that are :func:`ranked` already."""
    if need_bytes <= 0:  # 1
        return ()
    chosen: list[EvictionCandidate] = []
    freed_bytes = 0
    for candidate in candidates:  # 2
        chosen.append(candidate)
        freed_bytes += candidate.frees_bytes
        if freed_bytes >= need_bytes:
            return _without_needless(chosen, freed_bytes - need_bytes)  # 3
    return None  # 4


def _rank(candidate: EvictionCandidate, order: EvictionOrder) -> tuple[bool, bool, bool, float, float, InstanceKey]:
    by_regret = candidate.regret / max(1, candidate.frees_bytes)
    first = -candidate.slo_ttft_s if order is EvictionOrder.PAPER else by_regret
    stays, missed, in_use = not candidate.leaving, not candidate.costs_nothing, candidate.in_use
    return (stays, missed, in_use, first, -candidate.idle_s, candidate.key)


def _without_needless(chosen: list[EvictionCandidate], spare_bytes: int) -> tuple[EvictionCandidate, ...]:
    """Spare those whose bytes are not needed, the dearest (last chosen) first."""
    kept: list[EvictionCandidate] = []
    for candidate in reversed(chosen):
        if candidate.frees_bytes <= spare_bytes:
            spare_bytes -= candidate.frees_bytes
        else:
            kept.append(candidate)
    return tuple(reversed(kept))
