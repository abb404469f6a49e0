"""The one queue of a device: waiting requests of all its models, ranked by the admission policy.

The ranking is kept as one deque per model, so that a model whose engine is busy costs nothing while others dispatch,
and is made anew at most so often that planning stays a small share of one core however long the queue is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from prism.core.ids import ModelName, RequestId
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import Admission
from prism.core.specs import LatePolicy
from prism.policy.admission import moore_hodgson
from prism.scheduler.backlog import WaitingLine

_PLAN_PAUSE_S_PER_REQUEST = 100e-6
"""A plan over n requests holds for about n times this long; planning one request takes about a fiftieth of it, and one
node agent plans for all devices of its machine."""
_PLAN_AT_WILL = 32
"""Up to this many requests a plan costs so little that every event may make one."""

_LATE_SLACK_SHARE = 0.125
"""Part of the least slack of the on-time requests that late ones may use."""
_SHORT_SHARE = 0.25
"""A late request is short if it takes at most this part of the mean on-time one's time."""

_NOTHING_S = 1e-9
"""Rounding error of sums of seconds."""

PrefillSeconds = Callable[[Request], float]
_Entry = tuple[int, RequestId, ReasonCode]
_TOO_LATE = (ReasonCode.LATE, ReasonCode.OVERDUE)
_arrival = attrgetter("arrival_s")


@dataclass(slots=True)
class _ModelLine:
    """The waiting requests of one model: ``(rank, id, code)`` by rank, those that are too late by themselves; entries
    of requests that left are skipped."""

    since_s: float
    """Since when it has not been empty."""
    slo_ttft_s: float
    """Of its first request: a model has one objective."""
    ranked: deque[_Entry] = field(default_factory=deque)
    late: deque[_Entry] = field(default_factory=deque)
    """Those that will miss their first token, late and overdue ones."""
    count: int = 0
    tokens: int = 0

    def put(self, entry: _Entry) -> None:
        """Behind the others of its kind."""
        (self.late if entry[2] in _TOO_LATE else self.ranked).append(entry)

    def clear(self) -> None:
        self.ranked.clear()
        self.late.clear()


class WaitingQueue:
    """Owned by one :class:`prism.scheduler.gpu.GpuScheduler`."""

    def __init__(self, admission: Admission, overdue_share: float) -> None:
        self._admission = admission
        self._overdue_share = overdue_share
        self._overdue_lead_s = 0.0
        """How far overdue requests are ahead of their share of the time."""
        self._requests: dict[RequestId, Request] = {}
        self._lines: dict[ModelName, _ModelLine] = {}
        self._next_rank = 0
        self._first_rank = 0
        self._rejectable = 0
        self._changed = False
        self._planned_at_s = float("-inf")
        self._planned_for: tuple[float, ...] | None = None
        """What the standing plan was made for beside the requests; None: these are others by now."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._requests

    def models(self) -> Collection[ModelName]:
        """Models with waiting requests."""
        return self._lines.keys()

    def count(self, model: ModelName) -> int:
        """How many wait for the model."""
        line = self._lines.get(model)
        return 0 if line is None else line.count

    def counts(self) -> dict[ModelName, int]:
        return {model: line.count for model, line in self._lines.items()}

    def tokens(self) -> Iterable[tuple[ModelName, int]]:
        """Prompt tokens that wait, by model."""
        return ((model, line.tokens) for model, line in self._lines.items())

    def of_model(self, model: ModelName) -> list[Request]:
        """In order of arrival at this device."""
        return [r for r in self._requests.values() if r.model == model]

    def lines(self, seconds_per_token: Callable[[ModelName], float]) -> Iterator[WaitingLine]:
        """Of every model with waiting requests, with what a prompt token of it takes."""
        for model, line in self._lines.items():
            work_s = line.tokens * seconds_per_token(model)
            yield WaitingLine(model, line.since_s, line.slo_ttft_s, line.count, work_s)

    def waited_s(self, model: ModelName, now_s: float) -> float:
        """How long requests have been waiting for the model without a break; 0 when none waits."""
        line = self._lines.get(model)
        return 0.0 if line is None else now_s - line.since_s

    def tokens_of(self, model: ModelName) -> int:
        """Prompt tokens that wait for the model."""
        line = self._lines.get(model)
        return 0 if line is None else line.tokens

    def add(self, request: Request, now_s: float) -> None:
        """The request waits; until the next plan it stands behind the others (a resumed one before them)."""
        self._requests[request.id] = request
        self._planned_for = None
        line = self._lines.get(request.model)
        if line is None:
            line = self._lines[request.model] = _ModelLine(now_s, request.slo_ttft_s)
        line.count += 1
        line.tokens += request.prefill_tokens
        self._rejectable += request.late is LatePolicy.REJECT
        self._changed = True
        if request.is_resumed:
            self._first_rank -= 1
            line.ranked.appendleft((self._first_rank, request.id, ReasonCode.RESUMED))
        else:
            self._next_rank += 1
            line.ranked.append((self._next_rank, request.id, ReasonCode.ARRIVAL_ORDER))

    def remove(self, id: RequestId) -> Request:
        request = self._requests.pop(id)
        self._planned_for = None
        line = self._lines[request.model]
        line.count -= 1
        line.tokens -= request.prefill_tokens
        self._rejectable -= request.late is LatePolicy.REJECT
        if line.count == 0:
            del self._lines[request.model]
        return request

    def head(self, model: ModelName) -> tuple[int, Request, ReasonCode] | None:
        """The model's next request with its rank among all models."""
        heads = [head for too_late in (False, True) if (head := self.head_of(model, too_late)) is not None]
        return min(heads, key=lambda head: head[0], default=None)

    def head_of(self, model: ModelName, too_late: bool) -> tuple[int, Request, ReasonCode] | None:
        """The same among those of the model that will miss their first token, or among the others."""
        line = self._lines.get(model)
        entries = deque() if line is None else line.late if too_late else line.ranked
        while entries:
            rank, id, code = entries[0]
            request = self._requests.get(id)
            if request is not None:
                return rank, request, code
            entries.popleft()
        return None

    def in_time(self, model: ModelName) -> int:
        """How many of the model's requests are not known to be too late (those that just left may count)."""
        line = self._lines.get(model)
        return 0 if line is None else min(line.count, len(line.ranked))

    def ranking(self) -> list[RequestId]:
        """All waiting requests in the order in which they stand now."""
        return self._standing(e for line in self._lines.values() for e in (*line.ranked, *line.late))

    def _standing(self, entries: Iterable[_Entry]) -> list[RequestId]:
        """Whom these are of, without those that left; one that left and came back has two."""
        return list(dict.fromkeys(id for _, id, _ in sorted(entries) if id in self._requests))

    def beyond(self, model: ModelName, kept_share: float) -> list[RequestId]:
        """The last of the model's waiting requests as they stand now: all but ``kept_share`` of them, rounded up. Those
        whose stream has begun stay."""
        line = self._lines.get(model)
        if line is None:
            return []
        standing = [id for id in self._standing((*line.ranked, *line.late)) if not self._requests[id].is_resumed]
        return standing[math.ceil(kept_share * len(standing)) :]

    # --- planning ---

    @property
    def wants_plan_for_refusals(self) -> bool:
        """Some request may have to be refused for being late, whether or not an engine is free."""
        return self._rejectable > 0 and self._changed

    def _plan_due_s(self) -> float:
        return self._planned_at_s + max(0, len(self._requests) - _PLAN_AT_WILL) * _PLAN_PAUSE_S_PER_REQUEST

    def plan_held_until_s(self, now_s: float) -> float | None:
        """When a plan that is wanted now may be made; None: none is wanted, or it can be made at once."""
        wanted = self._changed and self._admission is Admission.MOORE_HODGSON
        return self._plan_due_s() if wanted and now_s < self._plan_due_s() else None

    def plan(self, now_s: float, busy_s: float, seconds: PrefillSeconds, speeds: int) -> list[Request]:
        """Rank all requests anew if that is due; ``busy_s`` is the prefill work that engines have already accepted.
        ``speeds``: another number whenever ``seconds`` says something else.

        Returns the late requests of models with ``late: reject``; they stay in the queue until :meth:`remove`.
        """
        if self._admission is not Admission.MOORE_HODGSON or now_s < self._plan_due_s():
            return []
        planned_for = now_s, busy_s, self._overdue_lead_s, speeds
        if planned_for == self._planned_for:
            return []  # engines report one after the other, and few of these reports change what is planned
        self._planned_at_s, self._planned_for, self._changed = now_s, planned_for, False
        if len(self._requests) == 1:
            return self._plan_one(next(iter(self._requests.values())), now_s, busy_s, seconds)
        resumed, overdue, rest = self._classes(now_s)
        slower = 1.0 / (1.0 - self._overdue_share) if overdue else 1.0
        start_s = now_s + busy_s + sum(map(seconds, resumed))
        execs_s = [seconds(r) * slower for r in rest]
        schedule = moore_hodgson([r.deadline_s for r in rest], execs_s, start_s)
        late = [rest[i] for i in schedule.late]
        on_time = [(rest[i], execs_s[i]) for i in schedule.on_time]
        ahead = _late_within_slack(late, on_time, start_s, seconds) if on_time and not overdue else []
        for line in self._lines.values():
            line.clear()
        self._next_rank = self._first_rank = 0
        self._rank(resumed, ReasonCode.RESUMED)
        self._rank(ahead, ReasonCode.LATE)
        self._interleave(overdue, on_time, seconds)
        gone_ahead = {r.id for r in ahead}
        self._rank([r for r in late if r.id not in gone_ahead] if ahead else late, ReasonCode.LATE)
        return [r for r in late if r.late is LatePolicy.REJECT]

    def _classes(self, now_s: float) -> tuple[list[Request], list[Request], list[Request]]:
        """Requests whose stream has begun, requests beyond their starvation bound (each by arrival), and the others."""
        resumed: list[Request] = []
        overdue: list[Request] = []
        rest: list[Request] = []
        for request in self._requests.values():
            if request.generated_tokens:
                resumed.append(request)
            elif now_s >= request.must_run_s:
                overdue.append(request)
            else:
                rest.append(request)
        resumed.sort(key=_arrival)
        overdue.sort(key=_arrival)
        return resumed, overdue, rest

    def _interleave(
        self, overdue: list[Request], on_time: list[tuple[Request, float]], seconds: PrefillSeconds
    ) -> None:
        """Rank both (on-time ones with their seconds) in one order in which the overdue ones get their share of the
        time."""
        share, lead_s = self._overdue_share, self._overdue_lead_s
        next_overdue = next_on_time = 0
        while next_overdue < len(overdue) and next_on_time < len(on_time):
            if lead_s <= _NOTHING_S:
                request = overdue[next_overdue]
                next_overdue += 1
                lead_s += seconds(request) * (1.0 - share)
                self._rank((request,), ReasonCode.OVERDUE)
            else:
                request, exec_s = on_time[next_on_time]
                next_on_time += 1
                lead_s -= exec_s * (1.0 - share) * share
                self._rank((request,), ReasonCode.ON_TIME)
        self._rank(overdue[next_overdue:], ReasonCode.OVERDUE)
        self._rank([r for r, _ in on_time[next_on_time:]], ReasonCode.ON_TIME)

    def dispatched(self, code: ReasonCode, exec_s: float) -> None:
        """A request of this class went to its engine: overdue ones use up the lead that on-time ones give them."""
        if code is ReasonCode.OVERDUE:
            self._overdue_lead_s += exec_s * (1.0 - self._overdue_share)
        elif code is ReasonCode.ON_TIME and self._overdue_lead_s > 0.0:
            self._overdue_lead_s = max(0.0, self._overdue_lead_s - exec_s * self._overdue_share)

    def _plan_one(self, request: Request, now_s: float, busy_s: float, seconds: PrefillSeconds) -> list[Request]:
        """The plan for the most frequent queue, without the machinery."""
        code = ReasonCode.ON_TIME
        if request.generated_tokens:
            code = ReasonCode.RESUMED
        elif now_s >= request.must_run_s:
            code = ReasonCode.OVERDUE
        elif now_s + busy_s + seconds(request) > request.deadline_s:
            code = ReasonCode.LATE
        line = self._lines[request.model]
        line.clear()
        line.put((1, request.id, code))
        self._next_rank, self._first_rank = 1, 0
        return [request] if code is ReasonCode.LATE and request.late is LatePolicy.REJECT else []

    def _rank(self, requests: Iterable[Request], code: ReasonCode) -> None:
        """They stand behind all that are ranked already. An overloaded device ranks hundreds of times a second all that
        wait there: nothing is called for one."""
        lines, rank, too_late = self._lines, self._next_rank, code in _TOO_LATE
        for request in requests:
            rank += 1
            line = lines[request.model]
            (line.late if too_late else line.ranked).append((rank, request.id, code))
        self._next_rank = rank


def _late_within_slack(
    late: list[Request], on_time: list[tuple[Request, float]], start_s: float, seconds: PrefillSeconds
) -> list[Request]:
    """Late requests that run ahead of the on-time ones: short ones, within a small part of the least slack. What missed
    its objective by little should not wait behind long prompts with loose ones; but most of the slack is needed by
    requests that are still to come."""
    least_slack_s, short_s = float("inf"), _SHORT_SHARE * sum(exec_s for _, exec_s in on_time) / len(on_time)
    for request, exec_s in on_time:
        start_s += exec_s
        least_slack_s = min(least_slack_s, request.deadline_s - start_s)
    budget_s = least_slack_s * _LATE_SLACK_SHARE
    ahead: list[Request] = []
    for request in late:
        exec_s = seconds(request)
        if exec_s <= min(short_s, budget_s):
            budget_s -= exec_s
            ahead.append(request)
    return ahead
