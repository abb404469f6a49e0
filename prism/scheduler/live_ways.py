"""How further instances of a model begin: the way of :mod:`prism.policy.live.choice`, asked with what the books know.

With ``auto`` only (``live_scaling.mode``, or the model's own); the other modes leave nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prism.core.ids import DeviceId, node_of
from prism.core.reasons import Number
from prism.core.settings import LiveMode
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.live.choice import ScaleWay
from prism.policy.live.pipelines import expected_pipelines
from prism.policy.live.scale_out import ComingTimes, ScaleOutLoad, choose_scale_out
from prism.scheduler.books import Books
from prism.scheduler.records import InstanceRecord, ModelRecord


@dataclass(frozen=True, slots=True)
class BegunWay:
    """What comes of a choice."""

    modes: tuple[LiveMode | None, ...]
    """Of the instances on each of the places asked for (None: as the settings say)."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Of the reason: the way, and what each way would serve within the objective."""


class LiveWays:
    """Reads the books; remembers nothing."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def choose(
        self,
        model: ModelRecord,
        places: Sequence[tuple[DeviceId, ...]],
        wanted: int,
        served_per_s: float,
        now_s: float,
    ) -> BegunWay:
        """How instances on ``places`` begin, of a model that serves. ``served_per_s``: of all its instances (0: not
        known)."""
        if self._books.live_mode(model) is not LiveMode.AUTO or not places:
            return BegunWay((None,) * len(places))
        if why := self._books.whole_only(model):
            return BegunWay((LiveMode.WHOLE,) * len(places), {"way": ScaleWay.STOP.value, "whole_only": why})
        active, new = model.in_state(InstanceState.READY), len(places)
        if not active:  # nobody to pair with, and nobody who serves meanwhile
            return BegunWay((LiveMode.PIPELINES,) * new, {"way": ScaleWay.PIPELINES.value})
        sources = len({node_of(i.queue_device) for i in active})
        pipelines = expected_pipelines(sources, new) if sources and new > 1 else ()
        load = ScaleOutLoad(
            serving=len(active),
            wanted=wanted,
            waiting=sum(i.waiting for i in active),
            arrivals_per_s=model.burst.per_s(now_s),
            served_per_s=served_per_s,
            objective_s=model.spec.slo_ttft_s,
        )
        hop_share = self._hop_share(model, active, places, now_s)
        times = ComingTimes(self._books.activation_s(model), model.early_s, model.spec.shape.layers, hop_share)
        peers = self._free_peers(model, now_s)
        choice = choose_scale_out(load, times, new, peers, self._coming_s(model, now_s), pipelines)
        numbers: dict[str, Number] = {**choice.as_numbers()}
        if choice.way is ScaleWay.PIPELINES:
            return BegunWay((LiveMode.PIPELINES,) * new, numbers)
        # As the choice counted them: one beside each that has everything and runs no layers for another one yet. More
        # would only make its steps longer for all.
        paired = min(new, peers) if choice.way is ScaleWay.ZIGZAG else 0
        modes = (LiveMode.PAIR,) * paired + (LiveMode.WHOLE,) * (new - paired)
        return BegunWay(modes, numbers)

    def _free_peers(self, model: ModelRecord, now_s: float) -> int:
        """Instances that have all weights and, as far as orders tell, lead nobody's requests but their own."""
        whole_s = self._books.activation_s(model)
        coming, serving = (
            model.in_state(InstanceState.WAITING, InstanceState.LOADING),
            model.in_state(InstanceState.READY),
        )
        leaning = sum(i.live is not LiveMode.WHOLE for i in coming)
        early = sum(i.live is not LiveMode.WHOLE and now_s - i.since_s < whole_s for i in serving)
        return max(0, len(serving) - 2 * early - leaning)

    def _hop_share(
        self,
        model: ModelRecord,
        active: Sequence[InstanceRecord],
        places: Sequence[tuple[DeviceId, ...]],
        now_s: float,
    ) -> float:
        """What a stop costs besides, in parts of a token's time, where any of ``places`` is on another machine than
        the instances that serve."""
        here = {node_of(i.queue_device) for i in active}
        if not active or all(node_of(devices[0]) in here for devices in places):
            return 0.0
        books = self._books
        busiest = max(active, key=lambda i: (i.running, i.key))
        token_s = books.times.token_s(books.fleet.devices[busiest.queue_device], busiest, now_s)
        return books.settings.live_hop_s / (token_s or model.spec.slo_tpot_s)

    def explain(self) -> Iterator[PlannedDecision]:
        """Instances on their way for whose model others serve, with the reason."""
        for model in self._books.loaded_models():
            here = tuple(i.queue_device for i in model.in_state(InstanceState.READY))
            for one in model.in_state(InstanceState.WAITING, InstanceState.LOADING) if here else ():
                yield PlannedDecision(model.name, "activate", here, one.devices, one.reason)

    def _coming_s(self, model: ModelRecord, now_s: float) -> tuple[float, ...]:
        """When those that were ordered before have all their weights."""
        whole_s = self._books.activation_s(model)
        coming = model.in_state(InstanceState.WAITING, InstanceState.LOADING)
        return tuple(max(0.0, whole_s - (now_s - i.since_s)) for i in coming)
