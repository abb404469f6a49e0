"""Devices as seats of one model at a time: for rivals that share a device over time and not over space."""

from __future__ import annotations

from abc import abstractmethod

from prism.core.ids import DeviceId
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.views import InstanceState
from prism.policy.virtual_queue import QueueSeat
from prism.scheduler.books import Books
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import NoRoom, Room, wait_or_refuse
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.survey import Survey


class Seats:
    """Reads the books; changes nothing."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def for_model(self, model: ModelRecord) -> list[QueueSeat]:
        """Groups of as many neighbouring devices of one domain as the model has shards, that are large enough."""
        need_bytes, tp, board = self._need_bytes(model), model.spec.tp, self._books.fleet.board
        seats: list[QueueSeat] = []
        for domain in board.domains:
            specs = [board.specs[i] for i in domain]
            ids = [spec.id for spec in specs if spec.memory_bytes >= need_bytes + spec.engine_bytes]
            usable = [id for id in ids if not self._books.fleet.devices[id].draining]
            starts = range(0, len(usable) - tp + 1, tp)
            seats += [self._seat(tuple(usable[start : start + tp])) for start in starts]
        return seats

    def none_for(self, model: ModelRecord) -> NoRoom:
        """The answer when no seat is large enough."""
        largest = max(d.spec.memory_bytes for d in self._books.fleet.devices.values())
        need_bytes = self._need_bytes(model)
        reason = because(ReasonCode.NO_FEASIBLE_DEVICE, need_bytes=need_bytes, largest_device_bytes=largest)
        return NoRoom(reason, None)

    def there(self, devices: tuple[DeviceId, ...]) -> list[InstanceRecord]:
        """Instances with a part on one of the devices."""
        return list({i.key: i for d in devices for i in self._books.fleet.devices[d].instances.values()}.values())

    def room_on(self, devices: tuple[DeviceId, ...], model: ModelRecord, now_s: float) -> Room:
        """The devices, once everybody there has left for ``model``."""
        victims: list[tuple[InstanceRecord, Reason]] = [
            (victim, because(ReasonCode.SWAP, for_model=model.name, held_s=now_s - victim.since_s))
            for victim in self.there(devices)
        ]
        return Room.on(devices, tuple(victims))

    def _need_bytes(self, model: ModelRecord) -> int:
        return model.spec.shard_weight_bytes + self._books.shard_kv_bytes(model.spec)

    def _seat(self, devices: tuple[DeviceId, ...]) -> QueueSeat:
        there = self.there(devices)
        settled = [i for i in there if i.state is InstanceState.READY and i.served]
        pinned = any(self._books.models[i.model].pinned for i in there)
        return QueueSeat(
            devices,
            tuple(i.model for i in there),
            may_leave=len(settled) == len(there) and not pinned,
            busy=any(i.idle_since_s is None for i in there),
            since_s=max((i.since_s for i in there), default=0.0),
        )


class SeatPolicy(ClusterPolicy):
    """A wanted model takes a seat, and whoever has it leaves. Which one is taken is what such policies differ in."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._seats = Seats(books)

    @abstractmethod
    def choose(self, seats: list[QueueSeat], model: ModelRecord, now_s: float) -> QueueSeat | None:
        """The seat that ``model`` gets of ``seats``, which are all that are large enough; None: it waits."""

    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        """The seat that is chosen, once it is left."""
        seats = self._seats.for_model(model)
        if not seats:
            return self._seats.none_for(model)
        seat = self.choose(seats, model, now_s)
        if seat is None:
            reason = because(ReasonCode.NO_ROOM, waiting=model.waiting)
            return wait_or_refuse(model, reason, self.books.activation_s(model), now_s)
        return self._seats.room_on(seat.devices, model, now_s)
