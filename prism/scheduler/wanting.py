"""Models that should be loaded: demand, looking for room, waiting, and refusing clearly when it cannot be."""

from __future__ import annotations

from abc import abstractmethod

from prism.core.effects import RefuseWaiting
from prism.core.events import ActivationError, Arrivals, WaitingRequests
from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import ClusterSettings
from prism.core.views import InstanceState
from prism.policy.demand import IDLE_GAP_S, IdleIntervals
from prism.scheduler.fleet import Instance, ModelState
from prism.scheduler.lifecycle import Lifecycle, NoRoom, Room

_RETRY_EVERY_S = 0.1
"""Pause between attempts to find room for models that wait for it."""
_RETRIES_AT_ONCE = 32
"""Most waiting models looked at in one attempt, the most urgent first."""
_ANSWER_WITHIN_S = 1.0
"""How long requests that were refused may still be counted as waiting before they are refused again."""
_DISTRUST_SHARE = 16
"""After a first refusal for lack of memory a model asks for this part of its size more."""
_PATIENCE_S = 1.0
"""A drain takes as long as what runs, usually nothing; only slower ones are hurried."""


class Wanting(Lifecycle):
    """Keeps trying for every wanted model until it is loaded or its requests are refused."""

    def __init__(self, settings: ClusterSettings, first_generation: int) -> None:
        super().__init__(settings, first_generation)
        self.pool_idle = IdleIntervals()
        """Idle intervals of all models together."""
        self._wanting: dict[ModelName, None] = {}
        self._failed: dict[ModelName, None] = {}
        """Models with an activation failure on record."""
        self._next_retry_s = float("inf")

    @abstractmethod
    def find_room(self, model: ModelState, now_s: float) -> Room | NoRoom:
        """Where ``model`` should be activated now."""

    def still_waiting(self, model: ModelState, now_s: float) -> None:
        """Called when no room was found and the requests wait on."""

    # --- demand ---

    def _arrivals(self, event: Arrivals, now_s: float) -> None:
        model = self.models.get(event.model)
        if model is None or model.removed:
            return
        since_s = model.idle_since_s if model.idle_since_s is not None else model.last_arrival_s
        if since_s is not None and now_s - since_s > IDLE_GAP_S:
            model.idle.observe(now_s - since_s)
            self.pool_idle.observe(now_s - since_s)
        model.last_arrival_s, model.idle_since_s = now_s, None
        for instance in model.instances:
            self.fleet.mark_busy(instance)
        self.expected.saw_request(now_s)
        model.rate.add(event.count, now_s)
        self.refresh_rate(model, now_s)

    def _waiting_requests(self, event: WaitingRequests, now_s: float) -> None:
        model = self.models.get(event.model)
        if (model is None or model.removed) and event.count:
            self._out.append(RefuseWaiting(event.model, because(ReasonCode.UNKNOWN_MODEL), None))
        if model is None:
            return
        model.refused_at_s = float("-inf")
        if model.waiting == 0:
            model.waiting_since_s = now_s
        model.waiting = event.count
        model.waiting_since_s = max(model.waiting_since_s, event.oldest_arrival_s)
        model.waiting_tokens, model.tightest_deadline_s = event.tokens, event.tightest_deadline_s
        if event.count == 0:
            model.waiting_since_s = model.tightest_deadline_s = float("inf")
            if model.want is None:
                self._wanting.pop(model.name, None)
        if event.count == 0 or model.removed:
            return
        model.tightest_deadline_s = min(event.tightest_deadline_s, event.oldest_arrival_s + model.spec.slo_ttft_s)
        if event.count > self.settings.max_waiting:
            reason = because(ReasonCode.QUEUE_FULL, waiting=event.count, bound=self.settings.max_waiting)
            retry_s = self.activation_s(model)
            self._out.append(RefuseWaiting(model.name, reason, retry_s, keep=self.settings.max_waiting))
        if model.in_state(InstanceState.ACTIVE):
            self.route(model)  # they entered the inactive queue before they saw the route
        else:
            self.want(model, now_s)

    def want(self, model: ModelState, now_s: float) -> None:
        """The model should be loaded: try at once, and again until it is, or its requests are refused."""
        if not self._enlist(model, now_s):
            return
        self._try(model, now_s)
        if model.name in self._wanting:
            self._next_retry_s = min(self._next_retry_s, max(now_s + _RETRY_EVERY_S, model.retry_at_s))

    def _enlist(self, model: ModelState, now_s: float) -> bool:
        """Among those that are tried again; False if it is on its way, or refused because it failed."""
        if model.coming_or_here or model.removed:
            return False
        if model.failed_for_good or (model.failures >= self.settings.activation_attempts and now_s < model.retry_at_s):
            self._refuse_failed(model, now_s)
            return False
        self._wanting[model.name] = None
        return True

    def _retry(self, now_s: float) -> None:
        """Try again: those that starve, longest first, then by deadline."""
        ready = [m for name in self._wanting if (m := self.models[name]).retry_at_s <= now_s]
        ready.sort(key=lambda m: _urgency(m, now_s))
        for model in ready[:_RETRIES_AT_ONCE]:
            self._try(model, now_s)
        pauses = (max(now_s + _RETRY_EVERY_S, self.models[name].retry_at_s) for name in self._wanting)
        self._next_retry_s = min(pauses, default=float("inf"))

    def _try(self, model: ModelState, now_s: float) -> None:
        if now_s < model.retry_at_s or now_s < model.refused_at_s + _ANSWER_WITHIN_S:
            return
        if model.coming_or_here:
            self._wanting.pop(model.name, None)
            return
        if not self.fleet.devices:
            answer: Room | NoRoom = self.give_up_waiting(model, because(ReasonCode.NO_DEVICES), now_s)
        else:
            answer = self.find_room(model, now_s)
        if isinstance(answer, Room):
            del self._wanting[model.name]
            reason = model.want or because(ReasonCode.DEMAND, waiting=model.waiting)
            if model.waiting:
                reason = Reason(reason.code, (*reason.numbers, ("waited_s", now_s - model.waiting_since_s)))
            self.start(model, answer, Reason(reason.code, reason.numbers + answer.numbers), now_s)
        elif answer.refuse is not None:
            self._refuse_no_room(model, answer, now_s)
        else:
            self.still_waiting(model, now_s)

    # --- those that wait for others to leave ---

    def _hurry(self, now_s: float) -> None:
        """Drains that a starving model waits for end now: what still runs there is carried over."""
        for instance in list(self.held.values()):
            if now_s < self._hurry_at_s(instance):
                continue
            for victim in self._slow_victims(instance):
                drains_s = now_s - victim.since_s
                reason = because(ReasonCode.STARVATION, for_model=instance.model, drains_s=drains_s)
                self.stop(victim, reason, now_s, carry=True)

    def _hurry_at_s(self, instance: Instance) -> float:
        """When the drains that ``instance`` waits for are to be hurried; infinite when they are already."""
        if not self._slow_victims(instance):
            return float("inf")
        return max(self.models[instance.model].starves_at_s, instance.since_s + _PATIENCE_S)

    def _slow_victims(self, instance: Instance) -> list[Instance]:
        found = [victim for key in instance.waits_for if (victim := self.loaded.get(key)) is not None]
        return sorted((v for v in found if not v.carried), key=lambda v: v.key)

    @property
    def next_hurry_s(self) -> float:
        """When a drain has to be hurried at the latest."""
        return min((self._hurry_at_s(i) for i in self.held.values()), default=float("inf"))

    # --- refusing ---

    def give_up_waiting(self, model: ModelState, reason: Reason, now_s: float) -> NoRoom:
        """Wait on, until the starvation bound of the oldest request is reached."""
        if model.waiting == 0 or now_s - model.waiting_since_s < model.spec.max_wait_s:
            return NoRoom()
        return NoRoom(reason, max(1.0, self.activation_s(model)))

    def _refuse_no_room(self, model: ModelState, answer: NoRoom, now_s: float) -> None:
        assert answer.refuse is not None
        for_ever = answer.retry_after_s is None
        if for_ever or model.waiting == 0:
            self._wanting.pop(model.name, None)
            model.want, model.failure = None, str(answer.refuse)
        before_s = None if for_ever else now_s - model.spec.max_wait_s
        self._refuse(model, answer.refuse, answer.retry_after_s, now_s, before_s)

    def _refuse(
        self,
        model: ModelState,
        reason: Reason,
        retry_after_s: float | None,
        now_s: float,
        before_s: float | None = None,
    ) -> None:
        """End the model's waiting requests (those that came before ``before_s``), once until the queue answers."""
        if model.waiting and now_s >= model.refused_at_s + _ANSWER_WITHIN_S:
            model.refused_at_s = now_s
            detail = model.failure if reason.code is ReasonCode.ACTIVATION_FAILED else ""
            self._out.append(RefuseWaiting(model.name, reason, retry_after_s, detail, before_s))

    # --- failures ---

    def _activation_failed(self, instance: Instance, error: ActivationError, detail: str, now_s: float) -> None:
        model = self.models[instance.model]
        if instance.state is not InstanceState.DRAINING and not model.removed:
            self._record_failure(model, instance, error, detail, now_s)
        self.gone(instance, now_s)
        if model.want is not None:
            self.want(model, now_s)

    def _record_failure(
        self, model: ModelState, instance: Instance, error: ActivationError, detail: str, now_s: float
    ) -> None:
        settings = self.settings
        passing = error is ActivationError.NO_MEMORY and not self._hopeless(model, instance)
        if error is ActivationError.STALE or passing:
            for device in instance.devices:  # somebody else holds the memory: look elsewhere for a while
                model.avoid_until_s[device] = now_s + settings.failure_backoff_s
                if error is ActivationError.NO_MEMORY:
                    self._distrust(model, instance, device)
            model.retry_at_s = now_s + _RETRY_EVERY_S
        else:
            model.failures += 1
            pause_s = settings.failure_backoff_s * 2.0 ** (model.failures - 1)
            model.retry_at_s = now_s + min(pause_s, settings.failure_backoff_max_s)
            model.failed_for_good = error.permanent
        model.failure = f"{error.value}: {detail}" if detail else error.value
        self._failed[model.name] = None

    def _record_stillborn(self, model: ModelState, words: str, now_s: float) -> None:
        """Its engine died by itself before any request had a token of it. One such death may be a request's fault, and
        the second is that request's again; after as many as there are attempts the entry itself is at fault, and only
        one more engine is tried after each pause. (An activation that succeeds clears failures, not this count.)"""
        settings = self.settings
        model.stillborn += 1
        beyond = model.stillborn - settings.activation_attempts
        if beyond >= 0:
            pause_s = settings.failure_backoff_s * 2.0 ** (settings.activation_attempts - 1 + beyond)
            model.failures = settings.activation_attempts
            model.retry_at_s = now_s + min(pause_s, settings.failure_backoff_max_s)
            model.failure = f"{ActivationError.ENGINE_DIED.value}: {words}"
            self._failed[model.name] = None

    def _hopeless(self, model: ModelState, instance: Instance) -> bool:
        """For the second time there was no memory for it although it was alone there: evictions will not help."""
        devices = [d for id in instance.devices if (d := self.fleet.devices.get(id)) is not None]
        return all(len(d.instances) == 1 and d.spec.id in model.short_bytes for d in devices)

    def _distrust(self, model: ModelState, instance: Instance, device: DeviceId) -> None:
        """The books promised memory on ``device`` that was not there: ask for more next time, twice as much each time,
        so that the same place is not tried in vain for ever."""
        if (index := self.fleet.index.get(device)) is not None:
            step_bytes = -(-self.fleet.board.need_on(index, instance.shard) // _DISTRUST_SHARE)
            model.short_bytes[device] = max(step_bytes, 2 * model.short_bytes.get(device, 0))

    def _clear_failure(self, model: ModelState) -> None:
        model.clear_failure()
        self._failed.pop(model.name, None)

    def _refuse_failed(self, model: ModelState, now_s: float) -> None:
        self._wanting.pop(model.name, None)
        if model.pinned and not model.failed_for_good:  # a pinned model is tried for ever, at the back-off's pace
            self._wanting[model.name] = None
            self._next_retry_s = min(self._next_retry_s, model.retry_at_s)
        else:
            model.want = None
        reason = because(ReasonCode.ACTIVATION_FAILED, failures=model.failures, error=model.failure)
        hopeless = model.failed_for_good or model.stillborn >= self.settings.activation_attempts
        retry_s = None if hopeless else max(1.0, model.retry_at_s - now_s)
        self._refuse(model, reason, retry_s, now_s)

    def memory_freed(self, model: ModelState, now_s: float) -> None:
        if model.waiting:
            self._enlist(model, now_s)
        if self._wanting:
            self._retry(now_s)

    def serves(self, model: ModelState) -> None:
        self._clear_failure(model)
        model.short_bytes = {d: b // 2 for d, b in model.short_bytes.items() if b > 1}
        model.want, model.wanted_devices = None, ()
        self._wanting.pop(model.name, None)

    def of_interest(self) -> list[ModelState]:
        """Models that are loaded, wanted or failed, most urgent waiting first."""
        names = dict.fromkeys([*self._wanting, *self._failed, *(i.model for i in self.loaded.values())])
        return sorted((self.models[n] for n in names), key=lambda m: (m.tightest_deadline_s, m.name))


def _urgency(model: ModelState, now_s: float) -> tuple[float, float, ModelName]:
    """Those that starve come first, the longest waiting first of all; the others by deadline."""
    since_s = model.waiting_since_s if now_s >= model.starves_at_s else float("inf")
    return (since_s, model.tightest_deadline_s, model.name)
