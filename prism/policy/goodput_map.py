"""Where models belong by what they are expected to be asked: the map by which most requests meet their objectives.

The candidates are those of fixed maps (:mod:`prism.policy.fixed_map`: MuxServe's placements and greedy balances), so
that what rivals find is found; the best of them by :mod:`prism.policy.goodput` is improved by moves and exchanges of
single models until none helps. Where nearly everybody meets everything at the mean of what is asked, they are judged
at bursts of it as well. Unlike a fixed map it is only where models begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.device_time import Batch, alone_s, bandwidth_share, slowdown
from prism.policy.fixed_map import Loads, Places, candidates
from prism.policy.goodput import SharingModel, Site
from prism.policy.map_room import MapRoom
from prism.policy.mux_estimate import PlannedLoad
from prism.policy.profiles import rates_on

_ROUNDS: Final = 4
"""How long requests run and how much they slow each other down agree well enough after so many."""
FACTORS: Final = (1.0, 2.0, 4.0, 8.0)
"""Multiples of what is expected that maps are judged at: the mean, and bursts of it up to the first at which many miss
theirs. At a burst alone models that it makes hopeless would cost nothing, and what is asked mostly is the mean."""
_ALL: Final = 0.75
"""Where more of all requests than this meet their objectives maps differ too little to be judged."""
_MOST_LOOKS: Final = 20_000
"""Moves and exchanges that are weighed, at most."""
_LEAST_GAIN: Final = 1e-4
"""Part of all requests that a step must gain."""
_ANYWHERE, _ANY_NODE = DeviceId(""), NodeId("")


def goodput_places(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int
) -> Places:
    """Devices for the models that are asked anything, as far as there is room; see the module."""
    asked = [m for m in models if loads[m.name].rate_per_s > 0.0]
    if not asked or not devices:
        return {}
    maps = list(candidates(asked, devices, loads, min_kv_tokens))
    most = max(len(places) for places in maps)
    widest = [places for places in maps if len(places) == most]
    for count in range(1, len(FACTORS) + 1):
        factors = FACTORS[:count]
        best = max((_Map(asked, devices, loads, factors, places) for places in widest), key=lambda m: m.met_per_s)
        if best.met_at(factors[-1]) < _ALL * best.asked_per_s:
            break
    best.improve(min_kv_tokens)
    return best.places


class _Map:
    """One way to place the models, with what is expected of every device."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        devices: Sequence[DeviceSpec],
        loads: Loads,
        factors: Sequence[float],
        places: Places,
    ) -> None:
        self._models = {m.name: m for m in models}
        self._devices = {d.id: d for d in devices}
        self._loads = loads
        self._then = {factor: {name: load.times(factor) for name, load in loads.items()} for factor in factors}
        self._known: dict[tuple[DeviceSpec, frozenset[ModelName]], float] = {}
        """For devices alike but for where they are."""
        self._alike = {d.id: replace(d, id=_ANYWHERE, node=_ANY_NODE, domain="") for d in devices}
        self.places = {name: ids for name, ids in places.items() if name in self._models}
        self._residents: dict[DeviceId, list[ModelName]] = {d.id: [] for d in devices}
        for name, ids in self.places.items():
            for id in ids:
                self._residents[id].append(name)
        self._met = {id: self._met_on(id, names) for id, names in self._residents.items()}

    @property
    def met_per_s(self) -> float:
        """Of the mean that is asked; what is met of each multiple counts alike."""
        return sum(self._met.values())

    def met_at(self, factor: float) -> float:
        """The same, when that multiple is asked."""
        return sum(self._met_then(factor, id, names) for id, names in self._residents.items())

    @property
    def asked_per_s(self) -> float:
        return sum(self._loads[name].rate_per_s for name in self.places)

    def _met_on(self, id: DeviceId, names: Sequence[ModelName]) -> float:
        key = self._alike[id], frozenset(names)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = fmean(self._met_then(factor, id, names) for factor in self._then)
        return known

    def _met_then(self, factor: float, id: DeviceId, names: Sequence[ModelName]) -> float:
        residents = [(self._models[name], self._then[factor][name]) for name in names]
        return planned_site(self._devices[id], residents).met_per_s / factor

    def improve(self, min_kv_tokens: int) -> None:
        """Take the first step that gains, until none does or enough were weighed."""
        least = _LEAST_GAIN * self.asked_per_s
        looks, gained = 0, True
        while gained and looks < _MOST_LOOKS:
            gained = False
            for here, there, goes, comes in self._steps():
                looks += 1
                if looks >= _MOST_LOOKS:
                    return
                if self._try(here, there, goes, comes, least, min_kv_tokens):
                    gained = True
                    break

    def _steps(self) -> Iterator[tuple[DeviceId, DeviceId, ModelName, ModelName | None]]:
        """Moves and exchanges of models of one device, from those devices first where most is missed."""
        lost = {id: self._asked_of(id) - met for id, met in self._met.items()}
        order = sorted(self._devices, key=lambda id: (-lost[id], id))
        for here in order:
            if lost[here] <= 0.0:
                return
            for goes in self._single(here):
                for there in reversed(order):
                    if there != here:
                        yield here, there, goes, None
                        for comes in self._single(there):
                            yield here, there, goes, comes

    def _asked_of(self, id: DeviceId) -> float:
        return sum(self._loads[n].rate_per_s / self._models[n].tp for n in self._residents[id])

    def _single(self, id: DeviceId) -> list[ModelName]:
        return [name for name in self._residents[id] if self._models[name].tp == 1]

    def _try(
        self,
        here: DeviceId,
        there: DeviceId,
        goes: ModelName,
        comes: ModelName | None,
        least: float,
        min_kv_tokens: int,
    ) -> bool:
        stays = [n for n in self._residents[here] if n != goes] + ([comes] if comes is not None else [])
        others = [n for n in self._residents[there] if n != comes] + [goes]
        if not (self._fit(here, stays, min_kv_tokens) and self._fit(there, others, min_kv_tokens)):
            return False
        met_here, met_there = self._met_on(here, stays), self._met_on(there, others)
        if met_here + met_there - self._met[here] - self._met[there] <= least:
            return False
        self._residents[here], self._residents[there] = stays, others
        self._met[here], self._met[there] = met_here, met_there
        self.places[goes] = (there,)
        if comes is not None:
            self.places[comes] = (here,)
        return True

    def _fit(self, id: DeviceId, names: Sequence[ModelName], min_kv_tokens: int) -> bool:
        room = MapRoom([self._devices[id]], min_kv_tokens)
        for name in names:
            if not room.fits(self._models[name], id):
                return False
            room.book(self._models[name], [id])
        return True


def planned_site(device: DeviceSpec, residents: Sequence[tuple[ModelSpec, PlannedLoad]]) -> Site:
    """The device as it is expected to be with these models: how long requests run depends on how much they slow each
    other down, and the other way round."""
    crowd = 1.0
    tenants: list[SharingModel] = []
    for _ in range(_ROUNDS):
        tenants = [_tenant(device, model, load, crowd) for model, load in residents]
        crowd = slowdown(sum(t.duty * t.share for t in tenants))
    return Site(device.id, float(device.memory_bytes), tuple(tenants))


def _tenant(device: DeviceSpec, model: ModelSpec, load: PlannedLoad, crowd: float) -> SharingModel:
    rates, shard_bytes = rates_on(model, device.kind), model.shard_weight_bytes
    held = (load.prompt_tokens + load.output_tokens / 2) * model.shape.kv_bytes_per_token / model.tp
    running = load.rate_per_s * load.output_tokens * alone_s(rates, Batch(shard_bytes, 0, 1)) * crowd
    batch = Batch(shard_bytes, int(held * max(1.0, running)), max(1, round(running)))
    return SharingModel(
        model=model.name,
        rate_per_s=load.rate_per_s / model.tp,
        duty=-math.expm1(-running),
        share=bandwidth_share(rates, batch),
        bearable=model.slo_tpot_s / alone_s(rates, batch),
        kv_bytes=held * running,
        weight_bytes=shard_bytes + device.engine_bytes,
    )
