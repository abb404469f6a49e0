"""Which idle instances have reached their model's keep-alive."""

from __future__ import annotations

from heapq import heappop, heappush

from prism.core.ids import ModelName
from prism.scheduler.fleet import Instance, InstanceKey, ModelState


class KeepAlive:
    """A lazy heap of expiry times: only models with a keep-alive cost anything, and only when they become idle."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, InstanceKey, float]] = []
        """``(expiry, instance, idle since)``."""

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def became_idle(self, instance: Instance, keep_alive_s: float | None) -> None:
        if keep_alive_s is not None and instance.idle_since_s is not None:
            heappush(self._heap, (instance.idle_since_s + keep_alive_s, instance.key, instance.idle_since_s))

    def expired(
        self, idle: dict[InstanceKey, Instance], models: dict[ModelName, ModelState], now_s: float
    ) -> list[Instance]:
        """Instances that are idle since their keep-alive; entries that are out of date are dropped."""
        result: list[Instance] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, key, since_s = heappop(self._heap)
            instance = idle.get(key)
            if instance is None or instance.idle_since_s != since_s:
                continue
            model = models[instance.model]
            if not model.pinned and model.waiting == 0:
                result.append(instance)
        return result
