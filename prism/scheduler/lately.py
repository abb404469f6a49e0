"""How devices were used in the last moments: who runs at the same time. Where every device is full that decides who
changes places, and it changes sooner than what is asked on average (:mod:`prism.scheduler.device_times`)."""

from __future__ import annotations

from typing import Final

from prism.core.ids import DeviceId
from prism.core.views import InstanceState
from prism.policy.device_time import Batch, alone_s
from prism.policy.goodput import SharingModel, Site
from prism.policy.profiles import rates_on
from prism.scheduler.books import Books
from prism.scheduler.records import DeviceRecord, InstanceRecord

_ANSWER_TOKENS: Final = 200.0
"""Of an answer of which nothing is known."""
_LEAST_DUTY: Final = 0.1


def lately_site(books: Books, id: DeviceId) -> Site:
    """The device with all that is placed there and stays, by what was asked lately; nothing of what is expected."""
    device = books.fleet.devices[id]
    stays = [i for i in device.instances.values() if i.state is not InstanceState.DRAINING]
    memory_bytes = float(books.fleet.board.capacity[books.fleet.index[id]])
    return Site(id, memory_bytes, tuple([_tenant(books, device, i) for i in stays]))


def _tenant(books: Books, device: DeviceRecord, instance: InstanceRecord) -> SharingModel:
    """Requests per second are those that are here over how long they take."""
    id, model = device.spec.id, books.models[instance.model]
    weight_bytes = books.fleet.board.weights_bytes(books.fleet.index[id], instance.shards[id])
    now_bytes = float(device.busy_kv.get(instance.key, 0) * (instance.running > 0))
    busy_bytes = max(now_bytes, instance.kv_mean_bytes / max(_LEAST_DUTY, instance.duty))
    step_s = alone_s(rates_on(model.spec, device.spec.kind), Batch(model.spec.shard_weight_bytes, 0, 1))
    tokens = dict(books.settings.expected_output_tokens).get(model.name, _ANSWER_TOKENS)
    rate_per_s = instance.requests_lately / (tokens * step_s)
    kv_bytes = busy_bytes, max(now_bytes, instance.kv_mean_bytes)
    return books.times.tenant_with(id, model, rate_per_s, instance.lately, kv_bytes, weight_bytes)
