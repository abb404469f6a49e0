"""The memory of a fleet while a fixed map is made: what is left on each device, and where a model fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prism.core.ids import DeviceId
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.pressure import domain_of, least_kv_bytes

Order = Callable[[DeviceId], tuple[float, ...]]


class MapRoom:
    """Books models on devices; nothing is ever taken back."""

    def __init__(self, devices: Sequence[DeviceSpec], min_kv_tokens: int) -> None:
        self._specs = {d.id: d for d in devices}
        self._min_kv_tokens = min_kv_tokens
        self.left_bytes = {d.id: d.memory_bytes for d in devices}
        """Beside weights, engines and everybody's least KV."""
        self.models = dict.fromkeys(self._specs, 0)
        self._domains: dict[str, list[DeviceId]] = {}
        for spec in devices:
            self._domains.setdefault(domain_of(spec), []).append(spec.id)

    def fits(self, model: ModelSpec, id: DeviceId) -> bool:
        """Whether a shard of the model, and its engine, has room there."""
        spec = self._specs[id]
        has_seat = not spec.max_engines or self.models[id] < spec.max_engines
        return has_seat and self.left_bytes[id] >= self._need_bytes(model, spec)

    def groups(self, model: ModelSpec, order: Order) -> list[tuple[DeviceId, ...]]:
        """In every domain that has room, the ``tp`` devices that come first by ``order``, then by name."""
        found = []
        for ids in self._domains.values():
            free = sorted((id for id in ids if self.fits(model, id)), key=lambda id: (order(id), id))
            if len(free) >= model.tp:
                found.append(tuple(free[: model.tp]))
        return found

    def book(self, model: ModelSpec, devices: Iterable[DeviceId]) -> None:
        """The model is placed there."""
        for id in devices:
            self.left_bytes[id] -= self._need_bytes(model, self._specs[id])
            self.models[id] += 1

    def share_bytes(self, model: ModelSpec, id: DeviceId) -> int:
        """The model's KV there when all models of the device have equal parts of what is left, beyond their least."""
        return self._kv_bytes(model, self._specs[id]) + self.left_bytes[id] // self.models[id]

    def _need_bytes(self, model: ModelSpec, device: DeviceSpec) -> int:
        """What a shard takes: weights and least KV in whole pages, and its engine."""
        weights, page = model.shard_weight_bytes, device.weight_page_bytes or 1
        return -(-weights // page) * page + device.engine_bytes + self._kv_bytes(model, device)

    def _kv_bytes(self, model: ModelSpec, device: DeviceSpec) -> int:
        """Least KV of a shard, in whole pages and at least one."""
        page = device.page_bytes or 1
        return max(device.page_bytes, -(-least_kv_bytes(model, self._min_kv_tokens) // page) * page)
