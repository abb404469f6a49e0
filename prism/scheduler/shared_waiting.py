"""What waits for a model's instances is shared out again whenever a further one has come up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prism.core.effects import ShareWaiting
from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import InstanceRecord, ModelRecord

COUNTED_REPORTS: Final = 3
"""With something in them: requests that are on their way to a queue come there within the first of these."""
_FEW: Final = 0.5
"""Instances that come are few when they are at most so many for each that serves."""


class SharedWaiting:
    """Remembers whose queues were not told since the newest instance of their model came up: what waits there may have
    come since (all that waited for a model that was on no device stands with its first instance at once), and a report
    in which nothing or little waits may have been made before it came. While what waited is being dealt to instances
    that come up nothing is shared out; when reports show it, all that serve are looked at."""

    def __init__(self, outbox: EffectOutbox) -> None:
        self._outbox = outbox
        self._untold: dict[InstanceKey, int] = {}
        """By instance, how many reports with something in them are looked at still."""
        self._settling: set[ModelName] = set()
        """Models of which reports do not show what queues hold."""

    def on_serving(self, model: ModelRecord, early: bool) -> None:
        """A further instance serves: each is to have as many, by their last reports. Not while many of those that come
        together, which have all their weights at about the same time, are to come: requests would be moved again and
        again. Few are not waited for, since one alone may be much later; nor does who serves early wait for others."""
        serving = model.in_state(InstanceState.READY)
        if len(serving) < 2:
            return
        self._untold |= {instance.key: COUNTED_REPORTS for instance in serving}
        coming = len(model.in_state(InstanceState.WAITING, InstanceState.LOADING))
        if model.name not in self._settling and (early or coming <= _FEW * len(serving)):
            self._share(serving, serving)

    def on_dealt(self, model: ModelName, settled: bool) -> None:
        """See :class:`~prism.core.events.WaitingDealt`."""
        if settled:
            self._settling.discard(model)
        else:
            self._settling.add(model)

    def on_settled(self, model: ModelRecord) -> None:
        """Its queues are as they were reported: who has more than its share now, or by its next reports, gives it away,
        whatever would have been given before."""
        serving = model.in_state(InstanceState.READY)
        if len(serving) > 1:
            self._untold |= {instance.key: COUNTED_REPORTS for instance in serving}
            self._share(serving, serving)

    def looks_at(self, key: InstanceKey) -> bool:
        """Whether the instance's next report matters here."""
        return key in self._untold

    def on_report(self, model: ModelRecord, instance: InstanceRecord) -> None:
        """The instance's queue was reported."""
        left = self._untold.get(instance.key, 0)
        if not left or not instance.busy or model.name in self._settling:
            return
        self._untold[instance.key] = left - 1
        if self._share(model.in_state(InstanceState.READY), [instance]) or left == 1:
            del self._untold[instance.key]

    def forget(self, instance: InstanceRecord) -> None:
        """It is gone."""
        self._untold.pop(instance.key, None)

    def _share(self, serving: list[InstanceRecord], of: Iterable[InstanceRecord]) -> bool:
        """Whether one of them had more than its share. The books have what follows: until the next reports these are
        the queues."""
        fair = sum(i.waiting for i in serving) / max(1, len(serving))
        crowded = [i for i in of if i.state is InstanceState.READY and i.waiting > fair + 1.0]
        for instance in crowded:
            kept_share = fair / instance.waiting
            reason = because(ReasonCode.SHARED_OUT, waiting=instance.waiting, instances=len(serving))
            self._outbox.emit(ShareWaiting(instance.key, instance.queue_device, kept_share, reason))
        if crowded:
            for instance in serving:
                instance.waiting = round(fair)
        return bool(crowded)
