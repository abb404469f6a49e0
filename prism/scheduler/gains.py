"""Whether a further instance of a model pays: what it would have in time, and what its neighbours would lose."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.settings import Placement
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.records import ModelRecord
from prism.scheduler.replica_load import ReplicaLoad

_LOST_AT_MOST: Final = 0.01
"""Part of its requests that a device may lose by an instance that only stands ready."""
_GROWS_TIMES, _GROWS_PER_S = 2.0, 8.0
"""A burst grows when so many times as many requests come as in the last minute on average, and so many a second at
least: fewer say little."""
_GROWS_GAIN: Final = 0.2
"""Part of what an instance for a burst that grows would serve which counts as gained: for a moment others can."""
_WAITS_GAIN: Final = 0.5
"""The same where requests wait for longer than they can bear, and none of them will be late as it is."""


class Further(NamedTuple):
    """One of several instances that a model is to have, as it is expected to be."""

    model: ModelRecord
    kv_bytes: int
    """What falls to it of the KV that the model's requests hold, on each device."""
    rate_per_s: float
    gained_per_s: float
    """Of that, what is not served in time without it."""


class Gains:
    """Questions to the books and to what is remembered of loads; nothing is changed."""

    def __init__(self, books: Books, load: ReplicaLoad) -> None:
        self._books, self._load = books, load

    def further(self, model: ModelRecord, wanted: int, now_s: float) -> Further:
        """One of ``wanted`` instances. Where the requests of its model neither wait nor have slow tokens all are in
        time as it is: nothing is gained, and little if its burst grows, when they will wait before the next instance is
        there. Prompts take turns with decoding, so that who waits is not lost yet: half of it, if none will be late."""
        rate_per_s = max(model.burst.per_s(now_s), model.rate.per_s(now_s)) / wanted
        gained_per_s = self._gained_share(model, now_s) * rate_per_s
        return Further(model, self._kv_share_bytes(model, wanted), rate_per_s, gained_per_s)

    def pays(self, one: Further, devices: Iterable[DeviceId], leave: Collection[InstanceKey] = ()) -> bool:
        """Whether it would have more requests in time on ``devices``, where instances ``leave`` for it, than are lost
        by it."""
        if self._books.settings.placement is not Placement.GOODPUT:
            return True
        met = [self.met_per_s(one, id, leave) for id in devices]
        return sum(after for _, after in met) >= (1.0 - _LOST_AT_MOST) * sum(before for before, _ in met)

    def met_per_s(self, one: Further, id: DeviceId, leave: Collection[InstanceKey] = ()) -> tuple[float, float]:
        """Requests per second that are in time on the device without it, and with it instead of those that ``leave``:
        of the only instance of a model every request counts as lost."""
        site, models, lost_per_s = self._books.times.site_of(id), self._books.models, 0.0
        before = site.met_per_s
        if leave:
            gone = {key.model for key in leave}
            alone = {name for name in gone if len(models[name].instances) == 1}
            lost_per_s = sum(t.rate_per_s for t in site.tenants if t.model in alone)
            site = site._replace(tenants=tuple(t for t in site.tenants if t.model not in gone))
            before = site.met_per_s + lost_per_s
        # An instance of many holds little, and for so long as the model had few, its mean is of one that holds all.
        newcomer = self._books.times.newcomer(one.model, id, one.rate_per_s, one.kv_bytes or None)
        return before, site.plus(newcomer._replace(rate_per_s=one.gained_per_s)).met_per_s

    def _gained_share(self, model: ModelRecord, now_s: float) -> float:
        serving = model.in_state(InstanceState.READY)
        if any(self._books.times.is_slow(d, now_s) for i in serving for d in i.shards):
            return 1.0
        if model.hot:
            return 1.0 if self._load.late(model, now_s) > 0.0 else _WAITS_GAIN
        now_per_s = model.burst.per_s(now_s)
        grows = now_per_s >= max(_GROWS_PER_S, _GROWS_TIMES * model.rate.per_s(now_s))
        return _GROWS_GAIN if grows else 0.0

    def _kv_share_bytes(self, model: ModelRecord, wanted: int) -> int:
        fleet = self._books.fleet
        held = [max(fleet.devices[d].busy_kv.get(i.key, 0) for d in i.shards) for i in model.instances]
        return sum(held) // max(1, wanted)
