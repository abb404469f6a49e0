"""Instances that are gone without having been told to, and ones that nobody here has started."""

from __future__ import annotations

from prism.core.effects import Deactivate
from prism.core.events import ActivationError, InstanceFound
from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import InstanceRecord
from prism.scheduler.shares import has_right_width
from prism.scheduler.wanting import Wanting


class Losses:
    """Keeps the books in step with what is found and lost; remembers nothing."""

    def __init__(self, books: Books, lifecycle: Lifecycle, wanting: Wanting, outbox: EffectOutbox) -> None:
        self._books, self._lifecycle, self._wanting, self._outbox = books, lifecycle, wanting, outbox

    def on_instance_lost(self, instance: InstanceRecord, now_s: float, stillborn: str = "") -> None:
        """Its engine died: replace it if anybody needs it. ``stillborn``: see :class:`InstanceLost`."""
        if instance.state is InstanceState.LOADING:
            detail = "the engine was lost while loading"
            self._wanting.on_activation_failed(instance, ActivationError.ENGINE_DIED, detail, now_s)
            return
        model = self._books.models[instance.model]
        served = instance.state is InstanceState.READY
        needed = served and (instance.busy or instance.idle_since_s is None)
        if stillborn and not model.removed:
            self._wanting.failures.record_stillborn(model, stillborn, now_s)
        self._lifecycle.remove_instance(instance, now_s)
        self._wanting.retry_freed(now_s)
        if model.removed:
            return
        if needed or model.pinned:
            model.want = model.want or because(ReasonCode.LOST, devices=",".join(instance.devices))
        if model.want is not None or model.waiting:
            self._wanting.want_model(model, now_s)

    def on_devices_lost(self, devices: list[DeviceId], now_s: float) -> None:
        """They are gone, with every instance that had a part there."""
        for instance in self._books.fleet.remove_devices(devices):
            if instance.state is InstanceState.LOADING:
                instance.state = InstanceState.WAITING  # not the model's fault: no failure is counted
            if instance.key in self._books.loaded:
                self.on_instance_lost(instance, now_s)

    def on_instance_found(self, event: InstanceFound, now_s: float) -> None:
        """It serves or is loading: taken over if the catalog has its model as it is, else told to leave."""
        key, parts = event.key, event.parts
        model = self._books.models.get(key.model)
        if (known := self._books.loaded.get(key)) is not None:
            if model is not None and not event.loading and known.state is InstanceState.LOADING:
                self._lifecycle.begin_serving(model, known, now_s)
                self._wanting.on_serving(model)
            return
        here = all(d in self._books.fleet.devices for part in parts for d in part.devices)
        if model is None or model.removed or not here or not has_right_width(parts, model.spec):
            self._outbox.emit(Deactivate(key, parts, False, because(ReasonCode.STALE)))
            return
        self._lifecycle.adopt_instance(model, event, now_s)
        if not event.loading:
            self._wanting.on_serving(model)
