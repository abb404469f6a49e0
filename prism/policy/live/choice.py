"""Which mechanism a scale-out uses: the one that serves most requests within their objective and, where several do, has
them wait least, estimated (pure).

Four ways, each a capacity that grows over time (in requests/s, added to what the instances that are there serve)::

    wait        nothing comes
    stop        an instance serves when its last byte is there
    zigzag      beside an overloaded instance: with a share f of the layers both serve what min(2, 1 / (1 - f))
                instances do (BlitzScale 5.2)
    pipelines   receivers that together hold the model serve together, each further one of a pipeline a little less
                (lambda-Scale 4.3); alone from their last block on

Requests wait in one line. Whoever arrives at t is served when the capacity since now adds up to everybody before; or,
where who cannot be in time any more gives way to who can (Moore-Hodgson, ``late_last``), to everybody before who was
not too late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class ScaleWay(StrEnum):
    """Simplest first: of ways that serve alike, and make wait alike, the first is taken."""

    WAIT = "wait"
    STOP = "stop"
    ZIGZAG = "zigzag"
    PIPELINES = "pipelines"


SIMPLER: Final = 0.99
"""A way that serves this part of what the best one serves is as good."""
SOONER: Final = 0.075
LEAST_SOONER: Final = 0.005
"""A way that serves as many as a simpler one is better where its requests wait for less, by more than so much of the
simpler one's wait and so much of their objective: what is less is noise of what is known of a load."""
STAGE_WAIT: Final = 0.38
"""What a further leader of a pipeline costs all of them, in parts of a pass: two leaders serve 1.45 and three 1.7 times
what one instance serves (measured on the prototype, docs/live-scaling.md)."""
_POINTS: Final = 400


@dataclass(frozen=True, slots=True)
class Receiver:
    """One instance on its way; times count from now."""

    first_s: float
    """When its first layers are there; layers follow evenly until ``alone_s``."""
    alone_s: float
    """When it has everything."""
    pipeline: int | None = None
    """The pipeline that it sits in; None: in none."""


@dataclass(frozen=True, slots=True)
class ScaleOutCase:
    """One scale-out to be decided on."""

    receivers: tuple[Receiver, ...]
    ready_s: Mapping[int, float]
    """Pipeline -> when its seats together hold the model."""
    serving: int
    """Instances that serve now."""
    overloaded: int
    """Of these, how many can be paired."""
    served_per_s: float
    """Requests/s of one whole instance."""
    waiting: int
    arrivals_per_s: float
    objective_s: float
    """Of the time until a request is begun."""
    horizon_s: float
    """Arrivals of so long are looked at."""
    coming: tuple[Receiver, ...] = ()
    """Instances that were ordered before: whatever is chosen now, they serve when they are complete."""
    chained: tuple[Receiver, ...] = ()
    """The same instances as chains bring them, for pairs; empty: as ``receivers``."""
    stage_wait: float = STAGE_WAIT
    hop_share: float = 0.0
    """What each further stop costs besides, in parts of a pass, where it is on another machine."""
    late_last: bool = False

    @property
    def requests(self) -> float:
        """That wait, and that arrive within the horizon."""
        return self.waiting + self.arrivals_per_s * self.horizon_s


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a way does for the requests that wait and those that arrive within the horizon."""

    met: float
    """So many are begun within their objective."""
    wait_s: float
    """How long one of them waits on average; whoever gives way to others (``late_last``) waits for an objective."""


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """The way that was taken, and what was expected of each."""

    way: ScaleWay
    outlooks: Mapping[ScaleWay, Outlook]
    forced: bool = False

    def as_numbers(self) -> dict[str, float | str]:
        """For a reason that operators read."""
        met = {f"met_{way.value}": round(of.met, 2) for way, of in self.outlooks.items()}
        waits = {f"wait_{way.value}_s": round(of.wait_s, 3) for way, of in self.outlooks.items()}
        return {"way": self.way.value, **met, **waits}


def choose_scaling(
    case: ScaleOutCase, forced: ScaleWay | None = None, possible: Collection[ScaleWay] = tuple(ScaleWay)
) -> ScaleChoice:
    """Of ``possible`` ways (at least one) the best; raises ``ValueError`` for a case without capacity or time.

    1. Those whose requests within the objective are all but as many as the most of any (:data:`SIMPLER`).
    2. Of these, those whose requests wait for all but as short as the shortest of them (:data:`SOONER`,
       :data:`LEAST_SOONER`).
    3. Of these the simplest."""
    if case.served_per_s <= 0 or case.horizon_s <= 0 or case.serving < 0:
        raise ValueError(f"a scale-out needs instances that serve and a horizon, got {case}")
    outlooks = {way: outlook(case, way) for way in ScaleWay if way in possible}
    return ScaleChoice(_best(outlooks, case.objective_s) if forced is None else forced, outlooks, forced is not None)


def _best(outlooks: Mapping[ScaleWay, Outlook], objective_s: float) -> ScaleWay:
    most = max(of.met for of in outlooks.values())
    alike = {way: of.wait_s for way, of in outlooks.items() if of.met >= SIMPLER * most}  # 1
    shortest_s = min(alike.values())
    noise_s = {way: max(SOONER * wait_s, LEAST_SOONER * objective_s) for way, wait_s in alike.items()}
    return next(way for way, wait_s in alike.items() if wait_s - noise_s[way] <= shortest_s)  # 2, 3


def outlook(case: ScaleOutCase, way: ScaleWay) -> Outlook:
    """What ``way`` does in this case."""
    times = np.linspace(0.0, case.horizon_s + case.objective_s, _POINTS + 1)
    capacity = capacity_at(case, way, times)
    served = np.concatenate([[0.0], np.cumsum((capacity[1:] + capacity[:-1]) / 2 * np.diff(times))])
    met, line = _late_last(case, served, times) if case.late_last else _in_order(case, served, times)
    return Outlook(met, float(np.trapezoid(line, times)) / max(case.requests, 1e-9))


def requests_met(case: ScaleOutCase, way: ScaleWay) -> float:
    """Requests, of those that wait and those that arrive within the horizon, that are begun within their objective."""
    return outlook(case, way).met


def _in_order(case: ScaleOutCase, served: Floats, times_s: Floats) -> tuple[float, Floats]:
    """How many are in time, and how many wait at each moment."""
    arrivals = np.linspace(0.0, case.horizon_s, _POINTS + 1)
    before = case.waiting + case.arrivals_per_s * arrivals
    begun_s = np.interp(before, served, times_s, right=np.inf)
    late = begun_s - arrivals > case.objective_s
    in_time = float(np.interp(case.objective_s, times_s, served))
    waiting_met = min(float(case.waiting), in_time)
    share = 1.0 - float(np.mean(late))
    met = waiting_met + share * case.arrivals_per_s * case.horizon_s
    return met, np.maximum(0.0, _arrived(case, times_s) - served)


def _late_last(case: ScaleOutCase, served: Floats, times_s: Floats) -> tuple[float, Floats]:
    """As a fluid: whoever has waited for an objective leaves the line."""
    arrived = _arrived(case, times_s)
    earlier_s = times_s - case.objective_s
    too_late = np.where(earlier_s < 0.0, 0.0, np.interp(earlier_s, times_s, arrived))
    out = met = 0.0
    line = [float(case.waiting)]
    for room_now, here, late in zip(np.diff(served).tolist(), arrived[1:].tolist(), too_late[1:].tolist(), strict=True):
        begun = min(room_now, here - out)
        met += begun
        out = max(out + begun, late)
        line.append(here - out)
    return float(met), np.asarray(line)


def _arrived(case: ScaleOutCase, times_s: Floats) -> Floats:
    """Requests that wait now or arrived until then."""
    return np.asarray(case.waiting + case.arrivals_per_s * np.minimum(times_s, case.horizon_s))


def capacity_at(case: ScaleOutCase, way: ScaleWay, times_s: Floats) -> Floats:
    """Requests/s at each of ``times_s``, of the instances that serve and of those that come."""
    total = np.full(len(times_s), float(case.serving))
    for receiver in case.coming:
        total += _alone(receiver, times_s)
    if way is ScaleWay.WAIT:
        return total * case.served_per_s
    if way is ScaleWay.ZIGZAG:
        paired = sorted(case.chained or case.receivers, key=lambda r: r.alone_s)
        for i, receiver in enumerate(paired):
            paired_now = i < case.overloaded
            total += _paired(receiver, case.hop_share, times_s) if paired_now else _alone(receiver, times_s)
        return total * case.served_per_s
    for receiver in case.receivers:
        total += _alone(receiver, times_s)
    if way is ScaleWay.PIPELINES:
        for pipeline, ready_s in case.ready_s.items():
            seats = [r for r in case.receivers if r.pipeline == pipeline]
            total += _together(seats, ready_s, case.stage_wait + case.hop_share, times_s)
    return total * case.served_per_s


def sharing(leaders: int, stage_wait: float) -> float:
    """What each of ``leaders`` of one pipeline serves, in parts of a whole instance."""
    return 1.0 / (1.0 + stage_wait * (leaders - 1)) if leaders else 0.0


def paired_rate(share: float) -> float:
    """What an instance with this share of the layers adds to the one beside it, in instances."""
    return 1.0 if share >= 0.5 else share / (1.0 - share)


def _alone(receiver: Receiver, times_s: Floats) -> Floats:
    return np.asarray(times_s >= receiver.alone_s, dtype=np.float64)


def _paired(receiver: Receiver, hop_share: float, times_s: Floats) -> Floats:
    took_s = max(receiver.alone_s - receiver.first_s, 1e-9)
    share = np.clip((times_s - receiver.first_s) / took_s, 0.0, 1.0)
    adds = np.where(share >= 0.5, 1.0, share / (1.0 - np.minimum(share, 0.5)))
    return np.where(share < 1.0, adds / (1.0 + hop_share), adds)


def _together(seats: Sequence[Receiver], ready_s: float, stage_wait: float, times_s: Floats) -> Floats:
    """Members that are not complete yet, while their pipeline serves; those that are go on alone."""
    members = np.zeros(len(times_s))
    for seat in seats:
        members += (times_s >= ready_s) & (times_s < seat.alone_s)
    seats_s = 1.0 / (1.0 + stage_wait * np.maximum(members - 1.0, 0.0))
    return np.asarray(members * seats_s, dtype=np.float64)
