"""What the controller tells of itself in metrics, beside what is counted where it happens."""

from __future__ import annotations

import time
from dataclasses import replace

from prism.obs import names
from prism.obs.metrics import Metrics
from prism.scheduler import planning
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.records import PrewarmCounts
from prism.store.interface import Store
from prism.wire import keys


class Gauges:
    """:meth:`look` every second."""

    def __init__(self, scheduler: ClusterScheduler, store: Store, metrics: Metrics) -> None:
        self._scheduler, self._store, self._metrics = scheduler, store, metrics
        self._told_prewarmed = PrewarmCounts()

    async def look(self) -> None:
        """Raises :class:`prism.store.values.StoreUnavailable`."""
        view, books = planning.view(self._scheduler, time.time()), self._scheduler.books
        for device in view.devices:
            self._metrics.set(names.KVPR, device.kvpr, device=device.id)
            self._metrics.set(names.DEVICE_WORK, books.fleet.work_on(device.id), device=device.id)
            if (error := books.times.corrections.error_of(device.id)) is not None:
                self._metrics.set(names.DEVICE_TIME_ERROR, error, device=device.id)
        self._tell_prewarmed()
        for model in view.models:
            self._metrics.set(names.MODEL_RATE, model.rate_per_s, model=model.name)
        length = (await self._store.lengths([keys.INACTIVE_QUEUE]))[0]
        self._metrics.set(names.QUEUE_LENGTH, length, queue="inactive")

    def _tell_prewarmed(self) -> None:
        """What has been counted since it was told last."""
        counts, told = self._scheduler.policy.prewarmed, self._told_prewarmed
        self._metrics.inc(names.PREWARMED, counts.used - told.used, outcome="used")
        self._metrics.inc(names.PREWARMED, counts.wasted - told.wasted, outcome="wasted")
        self._metrics.inc(names.PREWARM_SAVED, counts.saved_s - told.saved_s)
        self._told_prewarmed = replace(counts)

    def count_reload(self, outcome: str) -> None:
        """``applied``, ``unchanged`` or ``invalid``."""
        self._metrics.inc(names.RELOADS, outcome=outcome)
