"""Changes of the catalog, and which models are pinned."""

from __future__ import annotations

from prism.core.events import CatalogChanged
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode, because
from prism.core.specs import ModelSpec
from prism.policy.demand import SlidingRate
from prism.scheduler.books import Books
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import ModelRecord
from prism.scheduler.refusals import refuse_waiting
from prism.scheduler.wanting import Wanting


class CatalogEntries:
    """Owns which models the books know; remembers nothing else."""

    def __init__(self, books: Books, lifecycle: Lifecycle, wanting: Wanting, outbox: EffectOutbox) -> None:
        self._books, self._lifecycle, self._wanting, self._outbox = books, lifecycle, wanting, outbox

    def upsert(self, spec: ModelSpec, now_s: float) -> None:
        """A new entry, or a known one as it is now: what it has loaded leaves if it would load differently."""
        model = self._books.models.get(spec.name)
        if model is None:
            model = ModelRecord(spec, spec.pinned, SlidingRate(self._books.settings.rate_window_s))
            self._books.models[spec.name] = model
        old, model.spec, model.removed = model.spec, spec, False
        self._books.catalog_version += 1
        model.stillborn, model.whole_only = 0, ""
        self._wanting.failures.clear_failure(model)
        if _loads_differently(old, spec):
            for instance in list(model.instances):
                self._lifecycle.stop_instance(instance, because(ReasonCode.CATALOG), now_s)
        if spec.pinned != old.pinned:
            model.pinned = spec.pinned
        self._want_pinned(model)

    def _want_pinned(self, model: ModelRecord) -> None:
        if model.pinned:
            self._wanting.want_soon(model, because(ReasonCode.PINNED))

    def on_catalog_changed(self, event: CatalogChanged, now_s: float) -> None:
        for spec in event.upserted:
            self.upsert(spec, now_s)
            self._wanting.retry_freed(now_s)
            if self._books.models[spec.name].waiting:
                self._wanting.want_model(self._books.models[spec.name], now_s)
        for name in event.removed:
            if (model := self._books.models.get(name)) is not None:
                self._remove(model, now_s)

    def _remove(self, model: ModelRecord, now_s: float) -> None:
        model.removed, model.want = True, None
        self._books.catalog_version += 1
        self._wanting.unwant_model(model)
        self._wanting.failures.forget_model(model.name)
        refuse_waiting(self._outbox, model, because(ReasonCode.UNKNOWN_MODEL), None, now_s)
        if not model.instances:
            del self._books.models[model.name]
        for instance in list(model.instances):
            self._lifecycle.stop_instance(instance, because(ReasonCode.CATALOG), now_s)

    def on_pin_changed(self, name: ModelName, pinned: bool) -> None:
        if (model := self._books.models.get(name)) is not None:
            model.pinned = pinned
            self._want_pinned(model)


def _loads_differently(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether what is loaded for ``old`` cannot serve as ``new``."""
    return _loaded_for(old) != _loaded_for(new)


def _loaded_for(spec: ModelSpec) -> tuple[object, ...]:
    dimensions = (spec.path, spec.tp, spec.weight_bytes, spec.shape, spec.context_tokens)
    return (*dimensions, spec.engine_args, spec.scheduling, spec.lending)
