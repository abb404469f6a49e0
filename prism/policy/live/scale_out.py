"""A scale-out as the choice of its way needs it, from what a scheduler knows of a model (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.policy.live.choice import Receiver, ScaleChoice, ScaleOutCase, ScaleWay, choose_scaling
from prism.policy.live.pipelines import PipelineShare

_FIRST_PIECES: Final = 3
"""Embedding, first layer and head: what an instance needs before it can serve over another one."""
_LEAST_SERVED_PER_S: Final = 1e-6
"""A speed fitted to hardly any answers may be as good as none; a case needs one."""


@dataclass(frozen=True, slots=True)
class ScaleOutLoad:
    """One model when further instances of it are asked for."""

    serving: int
    wanted: int
    """Instances that its load asks for."""
    waiting: int
    arrivals_per_s: float
    served_per_s: float
    """Of all instances together; 0: not known."""
    objective_s: float
    """Of the time until a request is begun."""


@dataclass(frozen=True, slots=True)
class ComingTimes:
    """How long instances take to come."""

    whole_s: float
    """From the order until all weights are there."""
    early_s: float | None
    """Until they serve over another instance; None: not seen yet."""
    layers: int
    hop_share: float = 0.0
    """What a stop of a route costs besides, in parts of a token's time, where it is on another machine."""

    @property
    def first_s(self) -> float:
        """``early_s``, or what the pieces that it takes are of all."""
        if self.early_s is not None:
            return min(self.early_s, self.whole_s)
        return self.whole_s * min(1.0, _FIRST_PIECES / (self.layers + 2))


def choose_scale_out(
    load: ScaleOutLoad,
    times: ComingTimes,
    new: int,
    pairable: int,
    coming_s: tuple[float, ...],
    pipelines: Sequence[PipelineShare] = (),
) -> ScaleChoice:
    """How ``new`` instances begin, of which ``pairable`` could lean on one that serves; others come in ``coming_s``.
    ``pipelines``: those that they could form, all of them together.

    None at all is no answer: how many a load needs is said by :func:`prism.policy.replicas.instances_needed`, with room
    to spare, and this estimate knows no more than what came in the last moment."""
    possible = [ScaleWay.STOP]
    paired = min(pairable, load.serving)
    if paired:
        possible.append(ScaleWay.ZIGZAG)
    if pipelines:
        possible.append(ScaleWay.PIPELINES)
    whole_s = max(times.whole_s, 1e-3)
    first_s = min(times.first_s, whole_s)
    seats = [number for number, pipeline in enumerate(pipelines) for _ in range(pipeline.members)]
    case = ScaleOutCase(
        receivers=tuple(Receiver(first_s, whole_s, seats[i] if i < len(seats) else None) for i in range(new)),
        ready_s={i: first_s + (whole_s - first_s) * pipeline.ready for i, pipeline in enumerate(pipelines)},
        serving=load.serving,
        overloaded=paired,
        served_per_s=_served_per_s(load),
        waiting=load.waiting,
        arrivals_per_s=load.arrivals_per_s,
        objective_s=load.objective_s,
        horizon_s=2.0 * whole_s + load.objective_s,
        coming=tuple(Receiver(at_s, at_s) for at_s in coming_s),
        hop_share=times.hop_share,
        late_last=True,
    )
    return choose_scaling(case, possible=possible)


def _served_per_s(load: ScaleOutLoad) -> float:
    """Of one instance; where nobody has seen it yet, what it must be if the load asks for as many as it does, or if
    nothing waits."""
    if load.served_per_s > 0.0 and load.serving:
        each_per_s = load.served_per_s / load.serving
    elif not load.waiting and load.serving:
        each_per_s = load.arrivals_per_s / load.serving
    else:
        asked_per_s = load.arrivals_per_s + load.waiting / max(load.objective_s, 1e-3)
        each_per_s = asked_per_s / max(1, load.wanted)
    return max(each_per_s, _LEAST_SERVED_PER_S)
