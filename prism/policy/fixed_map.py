"""Fixed model-to-device maps of the rival policies (Prism, section A4; ALGORITHMS section 9).

``static`` (S-Partition) balances memory and gives every model of a device the same KV share. ``muxserve`` balances
compute demand, as MuxServe's greedy placement does over meshes, and lets the models of a device share KV on demand.
Both are made once, for all models that can be loaded at the same time; what does not fit has no place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prism.core.ids import DeviceId, ModelName
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.pressure import domain_of, least_kv_bytes


@dataclass(frozen=True, slots=True)
class FixedPlace:
    devices: tuple[DeviceId, ...]
    kv_cap_bytes: int | None
    """The model's KV share on each of the devices; None: shared on demand."""


@dataclass(slots=True)
class _Load:
    """One device while the map is made."""

    spec: DeviceSpec
    left_bytes: int
    compute: float = 0.0
    models: int = 0


def static_map(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], min_kv_tokens: int
) -> dict[ModelName, FixedPlace]:
    """Largest model first onto the devices with the most memory left.

    A model's KV share is its least KV (:func:`prism.policy.pressure.least_kv_bytes`) and an equal part of what is left.
    """
    loads = [_Load(d, d.memory_bytes) for d in devices]
    order = sorted(models, key=lambda m: (-m.shard_weight_bytes, m.name))
    taken = [(m, _take(m, loads, lambda load: -load.left_bytes, 0.0, min_kv_tokens)) for m in order]
    return {
        model.name: FixedPlace(
            tuple(load.spec.id for load in chosen),
            min(_kv_bytes(model, load.spec, min_kv_tokens) + load.left_bytes // load.models for load in chosen),
        )
        for model, chosen in taken
        if chosen is not None
    }


def muxserve_map(
    models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], rates: Mapping[ModelName, float], min_kv_tokens: int
) -> dict[ModelName, FixedPlace]:
    """Most demanding model first (expected rate x weights: each token reads them once) onto the devices with the least
    demand so far. ``rates`` in requests/s; a model without one counts as 1."""
    loads = [_Load(d, d.memory_bytes) for d in devices]

    def demand(model: ModelSpec) -> float:
        return rates.get(model.name, 1.0) * model.shard_weight_bytes

    order = sorted(models, key=lambda m: (-demand(m), m.name))
    places = {
        m.name: chosen
        for m in order
        if (chosen := _take(m, loads, lambda load: load.compute, demand(m), min_kv_tokens))
    }
    return {name: FixedPlace(tuple(load.spec.id for load in chosen), None) for name, chosen in places.items()}


def _take(
    model: ModelSpec, loads: list[_Load], least: Callable[[_Load], float], demand: float, min_kv_tokens: int
) -> list[_Load] | None:
    """The ``tp`` devices of one domain that come first by ``least`` and have room; books the model there."""
    domains: dict[str, list[_Load]] = {}
    for load in loads:
        has_seat = not load.spec.max_engines or load.models < load.spec.max_engines
        if has_seat and load.left_bytes >= _need_bytes(model, load.spec, min_kv_tokens):
            domains.setdefault(domain_of(load.spec), []).append(load)
    options = [
        sorted(d, key=lambda x: (least(x), x.spec.id))[: model.tp] for d in domains.values() if len(d) >= model.tp
    ]
    if not options:
        return None
    chosen = min(options, key=lambda loads: (least(loads[-1]), loads[-1].spec.id))
    for load in chosen:
        load.left_bytes -= _need_bytes(model, load.spec, min_kv_tokens)
        load.compute += demand
        load.models += 1
    return chosen


def _need_bytes(model: ModelSpec, device: DeviceSpec, min_kv_tokens: int) -> int:
    """What a shard takes on ``device``: weights and least KV in whole pages."""
    weights, page = model.shard_weight_bytes, device.weight_page_bytes or 1
    return -(-weights // page) * page + _kv_bytes(model, device, min_kv_tokens)


def _kv_bytes(model: ModelSpec, device: DeviceSpec, min_kv_tokens: int) -> int:
    """Least KV of a shard on ``device``, in whole pages and at least one."""
    page = device.page_bytes or 1
    return max(device.page_bytes, -(-least_kv_bytes(model, min_kv_tokens) // page) * page)
