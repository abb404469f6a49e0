"""Device reports, taken into the books."""

from __future__ import annotations

from prism.core.events import DeviceReport, InstanceLoad
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.records import InstanceRecord


def take_report(books: Books, report: DeviceReport, now_s: float) -> bool:
    """What the device holds, and how busy the instances are whose requests stand in its queue. False for a device that
    is not in the books."""
    if report.device in books.fleet.devices:
        books.times.settle(report.device, now_s)
    if not books.fleet.take_report(report, now_s):
        return False
    loaded = books.loaded
    for load in report.instances:
        instance = loaded.get(load.key)
        if instance is not None and instance.queue_device == report.device:
            _take_load(books, instance, load, now_s)
    books.times.take_report(report, now_s)
    return True


def _take_load(books: Books, instance: InstanceRecord, load: InstanceLoad, now_s: float) -> None:
    instance.running, instance.waiting, instance.kv_bytes = load.running, load.waiting, load.kv_bytes
    instance.waited_s, instance.first_tokens = load.waited_s, load.served
    if instance.state is not InstanceState.READY:
        return
    rested = now_s - instance.since_s >= books.settings.min_residency_s
    instance.served = instance.served or load.served > 0 or load.running > 0 or rested
    model = books.models[instance.model]
    if load.served:
        model.stillborn = 0
    if load.running > 0 or load.waiting > 0 or model.waiting:
        books.fleet.mark_busy(instance)
        model.idle_since_s = None
    else:
        books.fleet.mark_idle(instance, load.idle_s, now_s)
        # An instance that came while the model was idle has been idle for less long than its model.
        if model.idle_since_s is None:
            model.idle_since_s = model.resting_since_s
