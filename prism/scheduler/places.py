"""Places for a model as they are, without anybody leaving. Questions to the books; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from prism.core.ids import DeviceId
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import Placement
from prism.policy.pressure import Mask, Shard
from prism.policy.work import loads_with
from prism.scheduler.books import Books
from prism.scheduler.claims import Claims
from prism.scheduler.homes import Homes
from prism.scheduler.records import ModelRecord

_LOOKED_AT = 16
"""Most devices that are weighed against each other, the least loaded ones."""
_KEPT_FREE_S = 30.0
"""So long nobody comes, unless it starves, where a model in use had to leave for its neighbours' KV: it would take that
memory again."""
_AMPLE = 2.0 / 3.0
"""Part of the fleet's memory that weights may take where it does not matter for memory which model is where."""


class Places:
    """Which devices a model may use, which have room, and which of these bears it best."""

    def __init__(self, books: Books, claims: Claims) -> None:
        self._books, self._claims = books, claims
        self._homes = Homes(books)
        self._room_known_for, self._has_room = (-1, -1), False

    def shard_of(self, model: ModelRecord, now_s: float, sharers: int = 1) -> Shard:
        """What one shard of one of ``sharers`` instances would put on a device now; a model that just woke counts with
        one request."""
        spec, books = model.spec, self._books
        at_least = 1.0 / (books.settings.rate_window_s * spec.slo_ttft_s)
        rate = max(books.rates.rate_for_room(model, now_s), at_least) / sharers
        return Shard(rate / spec.tp, spec.shard_weight_bytes, books.shard_kv_bytes(spec))

    def allowed(self, model: ModelRecord, now_s: float) -> Mask:
        """Devices that the model may use now: in service, among those the operator named, not claimed by another model,
        not failed just now, not kept free for the KV of those that are there."""
        mask, index = self.open_to(model), self._books.fleet.index
        for device, until_s in model.avoid_until_s.items():
            if now_s < until_s and device in index:
                mask[index[device]] = False
        if now_s < model.starves_at_s and not model.wanted_devices:
            self._close(mask, self._kept_free(now_s))
        return mask

    def _kept_free(self, now_s: float) -> list[DeviceId]:
        fleet = self._books.fleet
        # When nothing runs there, nobody needs it.
        return [id for id in fleet.kept_free(_KEPT_FREE_S, now_s) if fleet.devices[id].busy_kv_bytes]

    def open_to(self, model: ModelRecord) -> Mask:
        """The same, failures aside."""
        fleet = self._books.fleet
        mask = fleet.usable.copy()
        if self._claims:
            self._close(mask, self._claims.others(model.name))  # one may just have been lost
        if model.wanted_devices:
            wanted = {fleet.index[d] for d in model.wanted_devices if d in fleet.index}
            for index in range(len(mask)):
                mask[index] &= index in wanted
        return mask

    def _close(self, mask: Mask, devices: Iterable[DeviceId]) -> None:
        for device in devices:
            if (index := self._books.fleet.index.get(device)) is not None:
                mask[index] = False

    def need_bytes(self, model: ModelRecord, device: DeviceId, shard: Shard) -> int:
        """Weights, least KV, and what turned out to be missing there lately."""
        fleet = self._books.fleet
        return fleet.board.need_on(fleet.index[device], shard) + model.short_bytes.get(device, 0)

    def never_fits(self, model: ModelRecord, now_s: float) -> Reason | None:
        """Why the model cannot be placed even on empty devices; None if it can."""
        shard, board = self.shard_of(model, now_s), self._books.fleet.board
        possible = board.could_ever_fit(shard)
        if any(int(possible[domain].sum()) >= model.spec.tp for domain in board.domains):
            return None
        return because(
            ReasonCode.NO_FEASIBLE_DEVICE,
            weight_bytes=shard.weight_bytes,
            min_kv_bytes=shard.min_kv_bytes,
            shards=model.spec.tp,
            largest_device_bytes=int(board.capacity.max()),
        )

    def find_free(
        self, model: ModelRecord, now_s: float, sharers: int = 1, without: Iterable[DeviceId] = ()
    ) -> tuple[tuple[DeviceId, ...], float] | None:
        """The feasible devices that bear the model best, none of them among ``without``, and their KV pressure."""
        fleet, shard = self._books.fleet, self.shard_of(model, now_s, sharers)
        if not (fits := fleet.fits_now(shard)).any():
            return None  # as on most looks at a full fleet
        allowed = fits & self.allowed(model, now_s)
        for device in model.short_bytes:
            if (index := fleet.index.get(device)) is not None:
                allowed[index] &= self.need_bytes(model, device, shard) <= fleet.room_on(index)
        for instance in model.instances:  # a second instance (migration) goes elsewhere
            self._close(allowed, instance.shards)
        self._close(allowed, without)
        if not allowed.any():
            return None
        best = self._home(model, shard, allowed) or self._best(model, shard, allowed)
        if best is None:
            return None
        ids = [fleet.board.specs[i].id for i in best[0]]
        if model.wanted_devices and set(ids) == set(model.wanted_devices):
            ids = list(model.wanted_devices)  # in the rank order that was asked for
        return tuple(ids), best[1]

    def _best(self, model: ModelRecord, shard: Shard, allowed: Mask) -> tuple[list[int], float] | None:
        """The allowed devices that bear the model best, and their worst KV pressure with it."""
        board, settings = self._books.fleet.board, self._books.settings
        if settings.placement is Placement.KVPR:
            return board.best(shard, model.spec.tp, allowed, settings.kvpr)
        alike = not self._books.rates.knows_anything and self.all_have_room()
        found = self._in_turn(model.spec.tp, allowed) if alike else self._best_for_goodput(model, shard, allowed)
        return None if found is None else (found, float(board.pressure_for(shard, settings.kvpr)[found].max()))

    def all_have_room(self) -> bool:
        """The weights of the whole catalog leave room enough for KV, wherever they are."""
        fleet = self._books.fleet
        known = self._books.catalog_version, fleet.version
        if self._room_known_for != known:
            weights_bytes = sum(m.spec.weight_bytes for m in self._books.models.values() if not m.removed)
            self._room_known_for = known
            self._has_room = weights_bytes <= _AMPLE * float(fleet.board.capacity.sum())
        return self._has_room

    def _home(self, model: ModelRecord, shard: Shard, allowed: Mask) -> tuple[list[int], float] | None:
        """Where the model belongs by what the catalog expects, if it can be there."""
        home = self._homes.of(model) if not model.instances else ()
        index = [self._books.fleet.index.get(id, -1) for id in home]
        if not index or not all(i >= 0 and allowed[i] for i in index):
            return None
        pressure = self._books.fleet.board.pressure_for(shard, self._books.settings.kvpr)
        return index, float(pressure[index].max())

    def _best_for_goodput(self, model: ModelRecord, shard: Shard, allowed: Mask) -> list[int] | None:
        """Of the least loaded devices the one where most requests meet their objectives with the model there."""
        fleet, times, board = self._books.fleet, self._books.times, self._books.fleet.board
        rate_per_s = shard.weighted_rate * model.spec.tp * model.spec.slo_ttft_s
        demand = times.demand_of(model, board.specs[0].id, rate_per_s)
        loads = loads_with(demand, fleet.work, fleet.kv_work, board.shared)
        if model.spec.tp > 1:
            return board.best_by(loads, model.spec.tp, allowed)
        order = [int(i) for i in np.argsort(np.where(allowed, loads, np.inf), kind="stable")[:_LOOKED_AT] if allowed[i]]

        def lost(index: int) -> float:
            site = times.site_of(board.specs[index].id)
            gain = site.plus(times.newcomer(model, site.id, rate_per_s)).met_per_s - site.met_per_s
            return -round(gain / max(rate_per_s, 1e-9), 2)

        return [min(order, key=lost)] if order else None

    def quiet(
        self, model: ModelRecord, kv_bytes: int, settled_s: float, now_s: float
    ) -> Iterator[tuple[DeviceId, ...]]:
        """Devices for further instances of ``model``, each on devices of its own, the least loaded first: in free room,
        with ``kv_bytes`` for each shard beside what their own requests may need again, where nothing is being loaded
        and memory has not been contested for ``settled_s``. As all is when the first is asked for."""
        fleet, shard = self._books.fleet, self.with_kv(model, kv_bytes, now_s)
        if not (fits := fleet.fits_now(shard)).any():
            return  # as on most looks at a full fleet
        allowed = fits & self.allowed(model, now_s)
        for other in model.instances:
            self._close(allowed, other.shards)
        loads, since_s, specs = fleet.loads(now_s), now_s - settled_s, fleet.board.specs
        if model.spec.tp == 1:  # of a full fleet most devices are looked at: their order is found once
            alone = (specs[i].id for i in fleet.board.in_order(loads, allowed))
            yield from ((id,) for id in alone if self._is_settled(id, shard, since_s))
            return
        while allowed.any() and (best := fleet.board.best_by(loads, model.spec.tp, allowed)) is not None:
            ids = tuple(specs[i].id for i in best)
            unfit = [i for i in ids if not self._is_settled(i, shard, since_s)]
            self._close(allowed, unfit or ids)
            if not unfit:
                yield ids

    def with_kv(self, model: ModelRecord, kv_bytes: int, now_s: float) -> Shard:
        """As :meth:`shard_of`, with room for ``kv_bytes`` at least."""
        shard = self.shard_of(model, now_s)
        return Shard(shard.weighted_rate, shard.weight_bytes, max(shard.min_kv_bytes, kv_bytes))

    def _is_settled(self, id: DeviceId, shard: Shard, since_s: float) -> bool:
        fleet = self._books.fleet
        device = fleet.devices[id]
        if device.contested_s >= since_s or fleet.headroom_bytes(id) < fleet.board.need_on(fleet.index[id], shard):
            return False
        return not device.expects_somebody

    def next_in_turn(self, model: ModelRecord, now_s: float) -> tuple[tuple[DeviceId, ...], float] | None:
        """Without the global scheduler (an ablation): the next devices in turn with room."""
        fleet = self._books.fleet
        allowed = fleet.fits_now(self.shard_of(model, now_s)) & self.allowed(model, now_s)
        found = self._in_turn(model.spec.tp, allowed)
        return None if found is None else (tuple(fleet.board.specs[i].id for i in found), 0.0)

    def _in_turn(self, tp: int, allowed: Mask) -> list[int] | None:
        """The next ``tp`` allowed devices of one domain after those that were used last."""
        fleet, last, count = self._books.fleet, self._books.last_devices, len(allowed)
        turn = fleet.index.get(last[-1], -1) + 1 if last else 0
        domains = [
            sorted((int(i) for i in d if allowed[i]), key=lambda i: (i - turn) % count) for d in fleet.board.domains
        ]
        enough = [d[:tp] for d in domains if len(d) >= tp]
        return min(enough, key=lambda d: (d[0] - turn) % count) if enough else None

    def kv_cap_bytes(self, model: ModelRecord, devices: tuple[DeviceId, ...], now_s: float) -> int | None:
        """Without elastic memory (an ablation): a fixed share, half of what is left on the devices, at least the least
        KV. None: no cap."""
        if self._books.settings.elastic_memory:
            return None
        fleet = self._books.fleet
        room = fleet.room()
        left = min(int(room[fleet.index[d]]) for d in devices) - model.spec.shard_weight_bytes
        return max(left // 2, self.least_kv_bytes(model, devices, now_s))

    def least_kv_bytes(self, model: ModelRecord, devices: tuple[DeviceId, ...], now_s: float) -> int:
        """Of one shard, in the whole pages that an account gives."""
        board, index, shard = self._books.fleet.board, self._books.fleet.index, self.shard_of(model, now_s)
        return max(board.kv_bytes(index[d], shard) for d in devices)
