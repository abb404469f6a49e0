"""Activations that failed: when they are tried again, where not, and with how much more memory."""

from __future__ import annotations

from prism.core.events import ActivationError
from prism.core.ids import DeviceId, ModelName
from prism.scheduler.books import Books
from prism.scheduler.records import InstanceRecord, ModelRecord

RETRY_EVERY_S = 0.1
"""Pause between attempts to find room for models that wait for it."""
_DISTRUST_SHARE = 16
"""After a first refusal for lack of memory a model asks for this part of its size more."""


class Failures:
    """Owns which models have a failure on record; what it was stands in their records."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._failed: dict[ModelName, None] = {}

    @property
    def models(self) -> list[ModelName]:
        """Models with an activation failure on record, the oldest record first."""
        return list(self._failed)

    def hold_back(self, model: ModelRecord, now_s: float) -> bool:
        """Whether the model's requests are to be refused instead of trying again now."""
        attempts = self._books.settings.activation_attempts
        return model.failed_for_good or (model.failures >= attempts and now_s < model.retry_at_s)

    def record_failure(
        self, model: ModelRecord, instance: InstanceRecord, error: ActivationError, detail: str, now_s: float
    ) -> None:
        """An activation failed.

        1. Nothing was tried, or somebody else holds the memory: look elsewhere for a while, try again at once.
           Where memory was missing, ask for more of it next time.
        2. Anything else, and no memory on a device that it has for itself: try again after a pause that doubles.
        3. The same will happen again: never try again by itself.
        """
        settings = self._books.settings
        passing = error is ActivationError.NO_MEMORY and not self._was_alone(model, instance)
        if error is ActivationError.STALE or passing:  # 1
            for device in instance.devices:
                model.avoid_until_s[device] = now_s + settings.failure_backoff_s
                if error is ActivationError.NO_MEMORY:
                    self._distrust(model, instance, device)
            model.retry_at_s = now_s + RETRY_EVERY_S
        else:  # 2
            model.failures += 1
            pause_s = settings.failure_backoff_s * 2.0 ** (model.failures - 1)
            model.retry_at_s = now_s + min(pause_s, settings.failure_backoff_max_s)
            model.failed_for_good = error.permanent  # 3
        model.failure = f"{error.value}: {detail}" if detail else error.value
        self._failed[model.name] = None

    def record_stillborn(self, model: ModelRecord, words: str, now_s: float) -> None:
        """Its engine died by itself before any request had a token of it. One such death may be a request's fault, and
        the second is that request's again; after as many as there are attempts the entry itself is at fault, and only
        one more engine is tried after each pause. (An activation that succeeds clears failures, not this count.)"""
        settings = self._books.settings
        model.stillborn += 1
        beyond = model.stillborn - settings.activation_attempts
        if beyond >= 0:
            pause_s = settings.failure_backoff_s * 2.0 ** (settings.activation_attempts - 1 + beyond)
            model.failures = settings.activation_attempts
            model.retry_at_s = now_s + min(pause_s, settings.failure_backoff_max_s)
            model.failure = f"{ActivationError.ENGINE_DIED.value}: {words}"
            self._failed[model.name] = None

    def is_hopeless(self, model: ModelRecord) -> bool:
        """Whether waiting will not help those who ask for the model."""
        return model.failed_for_good or model.stillborn >= self._books.settings.activation_attempts

    def _was_alone(self, model: ModelRecord, instance: InstanceRecord) -> bool:
        """For the second time there was no memory for it although it was alone there: evictions will not help."""
        fleet = self._books.fleet
        devices = [d for id in instance.devices if (d := fleet.devices.get(id)) is not None]
        return all(len(d.instances) == 1 and d.spec.id in model.short_bytes for d in devices)

    def _distrust(self, model: ModelRecord, instance: InstanceRecord, device: DeviceId) -> None:
        """The books promised memory on ``device`` that was not there: ask for more next time, twice as much each time,
        so that the same place is not tried in vain for ever."""
        fleet = self._books.fleet
        if (index := fleet.index.get(device)) is not None:
            step_bytes = -(-fleet.board.need_on(index, instance.shards[device]) // _DISTRUST_SHARE)
            model.short_bytes[device] = max(step_bytes, 2 * model.short_bytes.get(device, 0))

    def clear_failure(self, model: ModelRecord) -> None:
        """The model is as good as one that never failed."""
        model.clear_failure()
        self._failed.pop(model.name, None)

    def forget_model(self, model: ModelName) -> None:
        """The model left the catalog."""
        self._failed.pop(model, None)
