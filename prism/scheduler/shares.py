"""What each device of an instance carries of it: weights and least KV, from its parts."""

from __future__ import annotations

from prism.core.ids import DeviceId
from prism.core.instances import Part, Parts
from prism.core.specs import ModelSpec
from prism.policy.pressure import Shard, kv_floor_bytes


def shards_of(
    parts: Parts, spec: ModelSpec, min_kv_tokens: int, kv_cap_bytes: int | None = None
) -> dict[DeviceId, Shard]:
    """One shard per device, without a rate yet. ``kv_cap_bytes``: a fixed KV share on each device in place of the least
    one. A part holds the weights and the KV of its layers, in equal shards on its devices."""
    found: dict[DeviceId, Shard] = {}
    for part in parts:
        weight_bytes = _per_device(part, spec, spec.weight_bytes)
        least_bytes = _per_device(part, spec, kv_floor_bytes(spec, min_kv_tokens))
        shard = Shard(0.0, weight_bytes, least_bytes if kv_cap_bytes is None else kv_cap_bytes)
        found.update(dict.fromkeys(part.devices, shard))
    return found


def has_right_width(parts: Parts, spec: ModelSpec) -> bool:
    """Whether every part that runs the whole model has a device for each of the model's ranks."""
    return all(len(part.devices) == spec.tp for part in parts if part.is_whole_model)


def _per_device(part: Part, spec: ModelSpec, nbytes: int) -> int:
    """The share of ``nbytes`` of the whole model that falls to each device of the part, rounded up."""
    if part.layers is None:
        return -(-nbytes // len(part.devices))
    layers = part.layers.end - part.layers.first
    return -(-nbytes * layers // (spec.shape.layers * len(part.devices)))
