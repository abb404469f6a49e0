"""How further instances of a model begin: the way of :mod:`prism.policy.live.choice`, asked with what the books know.

With ``live_scaling: {mode: auto}`` only; the other modes leave nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import Number, Reason, ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.live.choice import ScaleWay
from prism.policy.live.scale_out import ComingTimes, ScaleOutLoad, choose_scale_out
from prism.scheduler.books import Books
from prism.scheduler.records import ModelRecord

_SHOWN_S: Final = 5.0
"""So long it can be read that a scale-out waits: while it is wanted it is asked for with every report."""


@dataclass(frozen=True, slots=True)
class BegunWay:
    """What comes of a choice."""

    modes: tuple[LiveMode | None, ...]
    """Of the instances on each of the places asked for (None: as the settings say); none: they do not come now."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Of the reason: the way, and what each way would serve within the objective."""


class LiveWays:
    """Owns which scale-outs wait."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._waits: dict[ModelName, tuple[float, Reason]] = {}

    def choose(
        self,
        model: ModelRecord,
        places: Sequence[tuple[DeviceId, ...]],
        wanted: int,
        served_per_s: float,
        now_s: float,
        *,
        may_wait: bool = False,
    ) -> BegunWay:
        """How instances on ``places`` begin, of a model that serves. ``served_per_s``: of all its instances (0: not
        known); ``may_wait``: its load asks for them, not an operator."""
        if self._books.settings.live is not LiveMode.AUTO or not places:
            return BegunWay((None,) * len(places))
        active = model.in_state(InstanceState.READY)
        pairable = len(places) if model.spec.tp == 1 and model.spec.shape.layers > 1 else 0
        load = ScaleOutLoad(
            serving=len(active),
            wanted=wanted,
            waiting=sum(i.waiting for i in active),
            arrivals_per_s=model.burst.per_s(now_s),
            served_per_s=served_per_s,
            objective_s=model.spec.slo_ttft_s,
        )
        times = ComingTimes(self._books.activation_s(model), model.early_s, model.spec.shape.layers)
        choice = choose_scale_out(load, times, len(places), pairable, self._coming_s(model, now_s), may_wait)
        numbers: dict[str, Number] = {**choice.as_numbers()}
        self._waits.pop(model.name, None)
        if choice.way is ScaleWay.WAIT:
            self._waits[model.name] = now_s, because(ReasonCode.SCALE_OUT, wanted=wanted, **numbers)
            return BegunWay((), numbers)
        live = LiveMode.PAIR if choice.way is ScaleWay.ZIGZAG else LiveMode.WHOLE
        return BegunWay((live,) * len(places), numbers)

    def explain(self, now_s: float) -> Iterator[PlannedDecision]:
        """Instances on their way for whose model others serve, with the reason; and scale-outs that lately waited."""
        for model in self._books.loaded_models():
            here = tuple(i.queue_device for i in model.in_state(InstanceState.READY))
            for one in model.in_state(InstanceState.WAITING, InstanceState.LOADING) if here else ():
                yield PlannedDecision(model.name, "activate", here, one.devices, one.reason)
            at_s, reason = self._waits.get(model.name, (float("-inf"), None))
            if reason is not None and now_s - at_s <= _SHOWN_S:
                yield PlannedDecision(model.name, "wait", here, (), reason)

    def forget_gone(self) -> None:
        """Drop what is remembered of models that the catalog does not have any more."""
        for name in [name for name in self._waits if name not in self._books.models]:
            del self._waits[name]

    def _coming_s(self, model: ModelRecord, now_s: float) -> tuple[float, ...]:
        """When those that were ordered before have all their weights."""
        whole_s = self._books.activation_s(model)
        coming = model.in_state(InstanceState.WAITING, InstanceState.LOADING)
        return tuple(max(0.0, whole_s - (now_s - i.since_s)) for i in coming)
