"""Where each model belongs by what the catalog expects of it (``expected_rates``), as long as that is all that is
known: the same foresight, and the same search, that fixed maps have."""

from __future__ import annotations

from typing import Final

from prism.core.ids import DeviceId
from prism.core.settings import Placement
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.fixed_map import Places, planned_loads
from prism.policy.goodput_map import goodput_places
from prism.scheduler.books import Books
from prism.scheduler.records import ModelRecord

_MOST_PAIRS: Final = 20_000
"""Of models that are asked and devices. In a larger fleet the search would take longer than a decision may, and models
begin one by one where most requests meet their objectives then."""


class Homes:
    """Owns the map; it is made when it is first asked for, and anew for other devices or models."""

    def __init__(self, books: Books) -> None:
        self._books = books
        settings = books.settings
        self._expects = bool(settings.expected_rates) and settings.placement is Placement.GOODPUT
        self._made_for: tuple[int, int] | None = None
        """Versions of catalog and fleet."""
        self._map: Places = {}

    def of(self, model: ModelRecord) -> tuple[DeviceId, ...]:
        """The model's devices; none for one of which nothing is expected, and once requests have shown more."""
        if not self._expects or not self._books.rates.expects_still:
            return ()
        known = self._books.catalog_version, self._books.fleet.version
        if self._made_for != known:
            models = [m.spec for m in self._books.models.values() if not m.removed]
            devices = [d.spec for d in self._books.fleet.devices.values() if not d.draining]
            self._made_for, self._map = known, self._make(models, devices)
        return self._map.get(model.name, ())

    def _make(self, models: list[ModelSpec], devices: list[DeviceSpec]) -> Places:
        settings = self._books.settings
        if sum(rate > 0.0 for _, rate in settings.expected_rates) * len(devices) > _MOST_PAIRS:
            return {}
        prompts, answers = dict(settings.expected_prompt_tokens), dict(settings.expected_output_tokens)
        loads = planned_loads(models, dict(settings.expected_rates), prompts, answers)
        return goodput_places(models, devices, loads, settings.min_kv_tokens)
