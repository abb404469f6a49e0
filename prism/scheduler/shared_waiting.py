"""What waits for a model's instances is shared out again whenever a further one has come up."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.effects import ShareWaiting
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import InstanceRecord, ModelRecord


class SharedWaiting:
    """Remembers whose queues were last told before the newest instance of their model came up: what waits there may
    have come since (all that waited for a model that was on no device stands with its first instance at once)."""

    def __init__(self, outbox: EffectOutbox) -> None:
        self._outbox = outbox
        self._untold: set[InstanceKey] = set()

    def on_serving(self, model: ModelRecord, early: bool) -> None:
        """A further instance serves: each is to have as many, by their last reports. Not before the last of those that
        come together, which have all their weights at about the same time: requests would be moved again and again. One
        that serves early does not wait for the others, which may be whole much later."""
        serving = model.in_state(InstanceState.READY)
        if len(serving) < 2:
            return
        self._untold.update(instance.key for instance in serving)
        if early or not model.in_state(InstanceState.WAITING, InstanceState.LOADING):
            self._share(serving, serving)

    def on_report(self, model: ModelRecord, instance: InstanceRecord) -> None:
        """The instance's queue was reported."""
        if instance.key in self._untold:
            self._untold.discard(instance.key)
            self._share(model.in_state(InstanceState.READY), [instance])

    def forget(self, instance: InstanceRecord) -> None:
        """It is gone."""
        self._untold.discard(instance.key)

    def _share(self, serving: list[InstanceRecord], of: Iterable[InstanceRecord]) -> None:
        """The books have what follows: until the next reports these are the queues."""
        fair = sum(i.waiting for i in serving) / max(1, len(serving))
        crowded = [i for i in of if i.state is InstanceState.READY and i.waiting > fair + 1.0]
        for instance in crowded:
            kept_share = fair / instance.waiting
            reason = because(ReasonCode.SHARED_OUT, waiting=instance.waiting, instances=len(serving))
            self._outbox.emit(ShareWaiting(instance.key, instance.queue_device, kept_share, reason))
        if crowded:
            for instance in serving:
                instance.waiting = round(fair)
