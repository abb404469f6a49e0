"""Models that should be loaded: they are tried until they are, or until their requests are refused clearly."""

from __future__ import annotations

from prism.core.effects import RefuseWaiting
from prism.core.events import ActivationError, WaitingRequests
from prism.core.ids import ModelName
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import NoRoom, Room, StartInstance
from prism.scheduler.failures import RETRY_EVERY_S, Failures
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.refusals import awaits_answer, refuse_waiting
from prism.scheduler.survey import Survey

_RETRIES_AT_ONCE = 32
"""Most waiting models looked at in one attempt, the most urgent first."""


class Wanting:
    """Owns which models are wanted and when they are tried next."""

    def __init__(self, books: Books, lifecycle: Lifecycle, policy: ClusterPolicy, outbox: EffectOutbox) -> None:
        self._books, self._lifecycle, self._policy, self._outbox = books, lifecycle, policy, outbox
        self.failures = Failures(books)
        self._wanting: dict[ModelName, None] = {}
        self.next_retry_s = float("inf")

    # --- wishes ---

    def want_model(self, model: ModelRecord, now_s: float) -> None:
        """The model should be loaded: try at once, and again until it is, or its requests are refused."""
        if not self._enlist(model, now_s):
            return
        self._try(model, Survey(), now_s)
        if model.name in self._wanting:
            self.next_retry_s = min(self.next_retry_s, max(now_s + RETRY_EVERY_S, model.retry_at_s))

    def want_because(self, model: ModelRecord, reason: Reason, now_s: float) -> None:
        """:meth:`want_model`, for ``reason`` unless there is one already."""
        model.want = model.want or reason
        self.want_model(model, now_s)

    def want_soon(self, model: ModelRecord, reason: Reason) -> None:
        """The same with the next event, unless it is on its way."""
        if not model.coming_or_here:
            model.want = model.want or reason
            self._wanting[model.name] = None
            self.next_retry_s = float("-inf")

    def unwant_model(self, model: ModelRecord) -> None:
        """Nobody asks for the model any more."""
        self._wanting.pop(model.name, None)

    def models_of_interest(self) -> list[ModelRecord]:
        """Models that are loaded, wanted or failed, most urgent waiting first."""
        models, loaded = self._books.models, self._books.loaded
        names = dict.fromkeys([*self._wanting, *self.failures.models, *(i.model for i in loaded.values())])
        return sorted((models[n] for n in names), key=lambda m: (m.tightest_deadline_s, m.name))

    # --- what is said of waiting requests ---

    def on_waiting(self, event: WaitingRequests, now_s: float) -> None:
        """The inactive queue of a model changed."""
        model = self._books.models.get(event.model)
        if (model is None or model.removed) and event.count:
            self._outbox.emit(RefuseWaiting(event.model, because(ReasonCode.UNKNOWN_MODEL), None))
        if model is None:
            return
        _note_waiting(model, event, now_s)
        if event.count == 0 and model.want is None:
            self.unwant_model(model)
        if event.count == 0 or model.removed:
            return
        model.tightest_deadline_s = min(event.tightest_deadline_s, event.oldest_arrival_s + model.spec.slo_ttft_s)
        bound = self._books.settings.max_waiting
        if event.count > bound:
            reason = because(ReasonCode.QUEUE_FULL, waiting=event.count, bound=bound)
            self._outbox.emit(RefuseWaiting(model.name, reason, self._books.activation_s(model), keep=bound))
        if model.in_state(InstanceState.READY):
            self._lifecycle.publish_route(model)  # they entered the inactive queue before they saw the route
        else:
            self.want_model(model, now_s)

    def on_serving(self, model: ModelRecord) -> None:
        """An instance of the model serves."""
        self.failures.clear_failure(model)
        model.short_bytes = {d: b // 2 for d, b in model.short_bytes.items() if b > 1}
        model.want, model.wanted_devices = None, ()
        self.unwant_model(model)

    def on_activation_failed(self, instance: InstanceRecord, error: ActivationError, detail: str, now_s: float) -> None:
        """Nothing of the instance exists."""
        model = self._books.models[instance.model]
        if instance.state is not InstanceState.DRAINING and not model.removed:
            self.failures.record_failure(model, instance, error, detail, now_s)
        self._lifecycle.remove_instance(instance, now_s)
        self.retry_freed(now_s)
        if model.want is not None:
            self.want_model(model, now_s)

    # --- trying ---

    def _enlist(self, model: ModelRecord, now_s: float) -> bool:
        """Among those that are tried again; False if it is on its way, or refused because it failed."""
        if model.coming_or_here or model.removed:
            return False
        if self.failures.hold_back(model, now_s):
            self._refuse_failed(model, now_s)
            return False
        self._wanting[model.name] = None
        return True

    def retry_freed(self, now_s: float) -> None:
        """If memory has come free, try everybody who waits."""
        if not self._lifecycle.freed:
            return
        freed, self._lifecycle.freed = self._lifecycle.freed, []
        for model in freed:
            if model.waiting:
                self._enlist(model, now_s)
        if self._wanting:
            self.retry_wanted(now_s)

    def retry_wanted(self, now_s: float) -> None:
        """Try again: those that starve, longest first, then by deadline."""
        models = self._books.models
        ready = [m for name in self._wanting if (m := models[name]).retry_at_s <= now_s]
        ready.sort(key=lambda m: _urgency(m, now_s))
        survey = Survey()
        for model in ready[:_RETRIES_AT_ONCE]:
            if self._try(model, survey, now_s):
                survey = Survey()
        earliest_s = min([models[name].retry_at_s for name in self._wanting], default=float("inf"))
        self.next_retry_s = max(now_s + RETRY_EVERY_S, earliest_s)

    def _try(self, model: ModelRecord, survey: Survey, now_s: float) -> bool:
        """Whether an instance was started: what ``survey`` has found does not hold any more then."""
        if not self._books.fleet_known or now_s < model.retry_at_s or awaits_answer(model, now_s):
            return False
        if model.coming_or_here:
            self.unwant_model(model)
            return False
        if self._books.fleet.devices:
            answer = self._policy.find_room(model, now_s, survey)
        else:
            answer = _without_devices(model, self._books.activation_s(model), now_s)
        if isinstance(answer, Room):
            self.unwant_model(model)
            self._lifecycle.start_instance(StartInstance(model, answer, _why(model, answer, now_s)), now_s)
            return True
        if answer.refuse is not None:
            self._refuse_no_room(model, answer, answer.refuse, now_s)
        else:
            for stop in self._policy.on_no_room(model, now_s):
                self._lifecycle.stop_instance(stop.instance, stop.reason, now_s, stop.carry)
        return False

    # --- refusing ---

    def _refuse_no_room(self, model: ModelRecord, answer: NoRoom, reason: Reason, now_s: float) -> None:
        for_ever = answer.retry_after_s is None
        if for_ever or model.waiting == 0:
            self.unwant_model(model)
            model.want, model.failure = None, str(reason)
        before_s = None if for_ever else now_s - model.spec.max_wait_s
        refuse_waiting(self._outbox, model, reason, answer.retry_after_s, now_s, before_s)

    def _refuse_failed(self, model: ModelRecord, now_s: float) -> None:
        self.unwant_model(model)
        if model.pinned and not model.failed_for_good:  # a pinned model is tried for ever, at the back-off's pace
            self._wanting[model.name] = None
            self.next_retry_s = min(self.next_retry_s, model.retry_at_s)
        else:
            model.want = None
        reason = because(ReasonCode.ACTIVATION_FAILED, failures=model.failures, error=model.failure)
        retry_s = None if self.failures.is_hopeless(model) else max(1.0, model.retry_at_s - now_s)
        refuse_waiting(self._outbox, model, reason, retry_s, now_s)


def _note_waiting(model: ModelRecord, event: WaitingRequests, now_s: float) -> None:
    model.refused_at_s = float("-inf")
    if model.waiting == 0:
        model.waiting_since_s = now_s
    model.waiting = event.count
    model.waiting_since_s = max(model.waiting_since_s, event.oldest_arrival_s)
    model.oldest_arrival_s = event.oldest_arrival_s
    model.waiting_tokens, model.tightest_deadline_s = event.tokens, event.tightest_deadline_s
    if event.count == 0:
        model.waiting_since_s = model.oldest_arrival_s = model.tightest_deadline_s = float("inf")


def _without_devices(model: ModelRecord, activation_s: float, now_s: float) -> NoRoom:
    """Wait for a machine, until the oldest request has waited for its bound in all: nobody is driven out by it here,
    and a request that machines have been lost with again and again would get another full wait each time."""
    if model.waiting == 0 or now_s - model.oldest_arrival_s < model.spec.max_wait_s:
        return NoRoom()
    return NoRoom(because(ReasonCode.NO_DEVICES), max(1.0, activation_s))


def _why(model: ModelRecord, room: Room, now_s: float) -> Reason:
    """Why the model is activated, with the numbers of its place."""
    reason = model.want or because(ReasonCode.DEMAND, waiting=model.waiting)
    numbers = reason.numbers
    if model.waiting:
        numbers = (*numbers, ("waited_s", now_s - model.waiting_since_s))
    return Reason(reason.code, numbers + room.numbers)


def _urgency(model: ModelRecord, now_s: float) -> tuple[float, float, ModelName]:
    """Those that starve come first, the longest waiting first of all; the others by deadline."""
    since_s = model.waiting_since_s if now_s >= model.starves_at_s else float("inf")
    return (since_s, model.tightest_deadline_s, model.name)
