"""Fixed model-to-device maps of the rival policies (Prism, section A4; ALGORITHMS section 9), and how they are chosen.

A map is made once, for all models that can be loaded at the same time; what does not fit has no place. Every rival
searches the same :func:`candidates` and takes the one that carries the largest multiple of what is asked, estimated
(:mod:`prism.policy.mux_estimate`) with its own way of dividing KV memory: ``static`` (S-Partition) in equal shares,
``muxserve`` on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prism.core.ids import DeviceId, ModelName
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.map_room import MapRoom
from prism.policy.mux_estimate import PlannedLoad, Resident, margin
from prism.policy.mux_placement import mux_placements

Places = dict[ModelName, tuple[DeviceId, ...]]
"""The devices of every model that has a place."""
Loads = Mapping[ModelName, PlannedLoad]


@dataclass(frozen=True, slots=True)
class FixedPlace:
    devices: tuple[DeviceId, ...]
    kv_cap_bytes: int | None
    """The model's KV share on each of the devices; None: shared on demand."""


def planned_loads(
    models: Sequence[ModelSpec],
    rates: Mapping[str, float],
    prompt_tokens: Mapping[str, float],
    output_tokens: Mapping[str, float],
) -> dict[ModelName, PlannedLoad]:
    """What every model is expected to be asked. A model that is not named is asked nothing, unless none is: then all
    are taken to be asked alike."""
    rest = 0.0 if rates else 1.0
    usual = PlannedLoad(rest)
    return {
        m.name: PlannedLoad(
            rates.get(m.name, rest),
            prompt_tokens.get(m.name, usual.prompt_tokens),
            output_tokens.get(m.name, usual.output_tokens),
        )
        for m in models
    }


def static_map(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int
) -> dict[ModelName, FixedPlace]:
    """The best of the :func:`candidates` when every model has a KV share of its own: its least KV
    (:func:`prism.policy.pressure.least_kv_bytes`) and an equal part of what is left on its device."""
    places = best_places(models, devices, loads, min_kv_tokens, equal_shares=True)
    room = MapRoom(devices, min_kv_tokens)
    chosen = [(m, places[m.name]) for m in models if m.name in places]
    for model, ids in chosen:
        room.book(model, ids)
    return {m.name: FixedPlace(ids, min(room.share_bytes(m, id) for id in ids)) for m, ids in chosen}


def muxserve_map(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int
) -> dict[ModelName, FixedPlace]:
    """The best of the :func:`candidates` when the models of a device share its KV memory on demand."""
    places = best_places(models, devices, loads, min_kv_tokens, equal_shares=False)
    return {name: FixedPlace(ids, None) for name, ids in places.items()}


def best_places(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int, *, equal_shares: bool
) -> Places:
    """Of the :func:`candidates` that have a place for most of what is asked, the one that carries the largest multiple
    of it; of equal ones that with more models, then the first."""
    by_name = {m.name: m for m in models}

    def merit(places: Places) -> tuple[float, float, int]:
        asked = sum(loads[name].rate_per_s for name in places)
        residents: dict[DeviceId, list[Resident]] = {d.id: [] for d in devices}
        for name, ids in places.items():
            for id in ids:
                residents[id].append((by_name[name], loads[name]))
        carried = [margin(d, residents[d.id], equal_shares=equal_shares) for d in devices if residents[d.id]]
        return round(asked, 9), round(min(carried, default=0.0), 2), len(places)

    return max(candidates(models, devices, loads, min_kv_tokens), key=merit)


def candidates(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int
) -> Iterator[Places]:
    """The search budget of every rival: three greedy balances (work and KV together, work alone, memory alone) and
    MuxServe's placements; each with all models that fit, and with only those that are asked anything."""
    for places in _every(models, devices, loads, min_kv_tokens):
        yield places
        asked = {name: ids for name, ids in places.items() if loads[name].rate_per_s > 0.0}
        if len(asked) < len(places):
            yield asked


def _every(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], loads: Loads, min_kv_tokens: int
) -> Iterator[Places]:
    def work(model: ModelSpec) -> float:
        return loads[model.name].work_s(model)

    def kv(model: ModelSpec) -> float:
        return loads[model.name].kv_bytes(model)

    def memory(model: ModelSpec) -> float:
        return float(model.weight_bytes)

    kv_weight = sum(map(work, models)) / max(1e-12, sum(map(kv, models)))
    yield _balanced(models, devices, min_kv_tokens, lambda m: work(m) + kv_weight * kv(m))
    yield _balanced(models, devices, min_kv_tokens, work)
    yield _balanced(models, devices, min_kv_tokens, memory)
    yield from mux_placements(models, devices, loads, min_kv_tokens)


def _balanced(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], min_kv_tokens: int, burden: Callable[[ModelSpec], float]
) -> Places:
    """Heaviest model first, onto the devices that bear least so far; of equal ones those with most memory left."""
    room = MapRoom(devices, min_kv_tokens)
    borne = dict.fromkeys(room.left_bytes, 0.0)
    places: Places = {}

    def state(id: DeviceId) -> tuple[float, float]:
        return borne[id], -float(room.left_bytes[id])

    for model in sorted(models, key=lambda m: (-burden(m) / m.tp, -m.shard_weight_bytes, m.name)):
        groups = room.groups(model, state)
        if not groups:
            continue
        chosen = min(groups, key=lambda ids: (max(map(state, ids)), ids))
        room.book(model, chosen)
        places[model.name] = chosen
        for id in chosen:
            borne[id] += burden(model) / model.tp
    return places
