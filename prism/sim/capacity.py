"""The fewest GPUs with which a trace reaches a target attainment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prism.core.errors import InvalidValue
from prism.sim.inputs import Inputs
from prism.sim.sweep import Point, run_point


@dataclass(frozen=True)
class Capacity:
    """``gpus`` is None when not even the most allowed reach the target. ``tried`` are all runs, by number of GPUs."""

    gpus: int | None
    target: float
    metric: str
    tried: tuple[Point, ...]


def fewest_gpus(
    inputs: Inputs,
    target: float,
    metric: str,
    most: int,
    run: Callable[[Inputs], Point] = run_point,
    on_try: Callable[[int], None] = lambda gpus: None,
) -> Capacity:
    """Double until the target is reached, then halve the interval.

    Attainment grows with the number of GPUs but for noise (placement is discrete), so that the answer is a count that
    reaches the target while the count below it, as tried, does not. ``metric`` is ``ttft``, ``tpot`` or ``both``.
    ``on_try`` is called with each number of GPUs before it is tried. Raises :class:`InvalidValue`.
    """
    if not 0.0 < target <= 1.0:
        raise InvalidValue("target", target, "must be a share above 0, at most 1")
    if most < 1:
        raise InvalidValue("most", most, "must be at least 1")
    tried: dict[int, Point] = {}

    def reaches(gpus: int) -> bool:
        if gpus not in tried:
            on_try(gpus)
            tried[gpus] = run(replace(inputs, gpus=gpus))
        attained: float = getattr(tried[gpus], metric)
        return attained >= target

    low, high = 0, 1
    while not reaches(high):
        low = high
        if high >= most:
            return Capacity(None, target, metric, tuple(tried[n] for n in sorted(tried)))
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return Capacity(high, target, metric, tuple(tried[n] for n in sorted(tried)))
