"""The rival policies over the same mechanism, engines and devices, so that only the policy differs.

``docs/policies.md`` says what was adapted from each paper.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.fixed_map import FixedPlace, Loads, muxserve_map, planned_loads, static_map
from prism.policy.virtual_queue import QueueSeat, choose_seat
from prism.scheduler.books import Books
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import Decision, NoRoom, Room, StopInstance, WantModel, wait_or_refuse
from prism.scheduler.records import ModelRecord
from prism.scheduler.seats import SeatPolicy
from prism.scheduler.survey import Survey

_MAP_AFTER_S = 1.0
"""How long the fixed map waits for further devices after the first ones joined, unless a request comes earlier."""
_QUANTUM_ACTIVATIONS = 80.0
"""``qlm``: a group in use keeps its device at least this many activation times. With few of them an overloaded fleet
swaps and prefills again what was running, and does little else (``docs/experiments/scheduling.md``)."""


class FixedMapPolicy(ClusterPolicy):
    """All models of a map made once are loaded at the start and stay: no eviction, no migration."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._map: dict[ModelName, FixedPlace] | None = None
        self._map_at_s = float("inf")
        self._loaded_map = False
        self._looked: tuple[list[ModelSpec], list[DeviceSpec], dict[ModelName, FixedPlace]] | None = None
        """The map that was made last, and what for: making one is a search."""

    @abstractmethod
    def make_map(self, models: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> dict[ModelName, FixedPlace]:
        """The policy's map for this catalog and these devices."""

    def on_time(self, now_s: float) -> Iterator[Decision]:
        """Make the map once the devices are known, and load everything in it."""
        if (self._loaded_map and self._map is not None) or not self.books.fleet.devices:
            return
        if self._map_at_s == float("inf"):
            self._map_at_s = now_s + _MAP_AFTER_S
        if self._map is None and (now_s >= self._map_at_s or self._is_asked()):
            self._map = self._the_map()
        if self._map is not None and not self._loaded_map:
            self._loaded_map = True
            for name in self._map:
                yield WantModel(self.books.models[name], because(ReasonCode.FIXED_MAP))

    def _is_asked(self) -> bool:
        """Somebody could not wait for the map."""
        return bool(self.books.loaded) or any(m.waiting or m.pinned for m in self.books.models.values())

    def next_time_s(self) -> float:
        return float("inf") if self._loaded_map or not self.books.fleet.devices else self._map_at_s

    def _the_map(self) -> dict[ModelName, FixedPlace]:
        """The map, as it was made or as it would be made now."""
        if self._map is not None:
            return self._map
        models = [m.spec for m in self.books.models.values() if not m.removed]
        devices = [d.spec for d in self.books.fleet.devices.values()]
        if self._looked is None or self._looked[:2] != (models, devices):
            self._looked = models, devices, self.make_map(models, devices)
        return self._looked[2]

    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        """The model's place in the map.

        1. It has none: refused for good.
        2. A device of it is gone or leaves service: it waits.
        3. The memory is not there (yet): it waits.
        """
        place, fleet = self._the_map().get(model.name), self.books.fleet
        if place is None:  # 1
            return NoRoom(because(ReasonCode.NOT_PLACED), None)
        if any(d not in fleet.devices or fleet.devices[d].draining for d in place.devices):  # 2
            return self._wait(model, because(ReasonCode.NO_DEVICES, devices=",".join(place.devices)), now_s)
        if any(fleet.room_on(fleet.index[d]) < self._shard_bytes(model.spec, d) for d in place.devices):  # 3
            return self._wait(model, because(ReasonCode.NO_ROOM, waiting=model.waiting), now_s)
        return Room.on(place.devices, (), place.kv_cap_bytes)

    def _shard_bytes(self, spec: ModelSpec, device: DeviceId) -> int:
        return spec.shard_weight_bytes + self.books.fleet.devices[device].spec.engine_bytes

    def loads(self, models: Sequence[ModelSpec]) -> Loads:
        """What the models are expected to be asked."""
        settings = self.books.settings
        return planned_loads(
            models,
            dict(settings.expected_rates),
            dict(settings.expected_prompt_tokens),
            dict(settings.expected_output_tokens),
        )

    def _wait(self, model: ModelRecord, reason: Reason, now_s: float) -> NoRoom:
        return wait_or_refuse(model, reason, self.books.activation_s(model), now_s)

    def on_catalog_changed(self, now_s: float) -> Iterator[Decision]:
        """A changed catalog is a new map: what keeps its place stays loaded, the rest is loaded anew."""
        old, self._map = self._map, None
        if old is None or not self.books.fleet.devices:
            return
        new = self._map = self._the_map()
        self._loaded_map = False
        for instance in list(self.books.loaded.values()):
            if new.get(instance.model) != old.get(instance.model):
                yield StopInstance(instance, because(ReasonCode.CATALOG))


class StaticPolicy(FixedMapPolicy):
    """``static``: every model has its devices and a fixed KV share."""

    def make_map(self, models: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> dict[ModelName, FixedPlace]:
        return static_map(models, devices, self.loads(models), self.books.settings.min_kv_tokens)


class MuxServePolicy(FixedMapPolicy):
    """``muxserve``: every model has its devices; KV is shared on demand among the models of a device."""

    def make_map(self, models: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> dict[ModelName, FixedPlace]:
        return muxserve_map(models, devices, self.loads(models), self.books.settings.min_kv_tokens)


class QlmPolicy(SeatPolicy):
    """``qlm``: one model per device at a time, swapped in the order of the groups' deadlines."""

    def choose(self, seats: list[QueueSeat], model: ModelRecord, now_s: float) -> QueueSeat | None:
        """A free device, else the device of a finished group, else that of one that had its quantum."""
        swap_s = self.books.activation_s(model)
        return choose_seat(seats, model.tightest_deadline_s, swap_s, _QUANTUM_ACTIVATIONS * swap_s, now_s)
