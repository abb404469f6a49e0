"""What the scheduler of a device knows about one engine: can a request start there at once, and what does it take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from prism.core.device_events import EngineLoad, EngineUp
from prism.core.ids import RequestId
from prism.core.request import Request
from prism.core.specs import Prefer
from prism.policy.latency_model import EnginePace, PrefillSpeed, TokenTime
from prism.policy.long_prompts import WINDOW_SHARE, goes_long
from prism.scheduler.gpu_prompts import PromptTurns

_NOTHING_S: Final = 1e-6
"""Rounding error of sums of times."""


@dataclass(slots=True)
class InFlight:
    """A dispatched request."""

    request: Request
    dispatched_clock_s: float
    """Shared device clock at dispatch."""
    promised: bool
    """It is in time so far (:mod:`prism.policy.promises`)."""
    began_s: float
    has_token: bool = False
    first_token_s: float = 0.0
    """When it came, of this attempt."""
    undisturbed_s: float = 0.0
    """The device's clock of undisturbed steps then."""
    stood_s: float = 0.0
    """For how long the engine's answers had stood still then, in all."""


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """What an answer that ended says of steps."""

    tokens: int
    """After the first one of its attempt, at least one."""
    undisturbed_s: float
    """The device's clock of undisturbed steps at the first token."""


@dataclass(slots=True)
class EngineState:
    """One engine that is up. All token counts are the engine's own tokens."""

    up: EngineUp
    speed: PrefillSpeed
    reserve_tokens: int
    """Most that is kept for a running request to grow by (``decode_reserve_tokens``)."""
    draining: bool = False
    in_flight: dict[RequestId, InFlight] = field(default_factory=dict)
    no_token_yet: int = 0
    served: int = 0
    """Requests that got their first token."""
    promised: int = 0
    """Requests that are in time so far."""
    held_tokens: int = 0
    """Tokens of its requests when they began."""
    began_sum_s: float = 0.0
    """Sum of the times at which they began."""
    answering: int = 0
    """Requests that have a first token."""
    first_token_sum_s: float = 0.0
    undisturbed_sum_s: float = 0.0
    """Sums of their times and of the device's clock of undisturbed steps at it."""
    pace: EnginePace = field(default_factory=EnginePace)
    log_factor: float = 0.0
    """Logarithm of what its steps take over what a roofline says, as it was learned."""
    growth_tokens: int = 0
    """What the running ones are expected to grow by in the time to come."""
    backlog_tokens: int = 0
    """Of dispatched requests without a first token, whole prompts: they stand before a newly dispatched one."""
    free_tokens: int | None = None
    """Last report, without caches that count as free memory of the device; None before the first."""
    claims: dict[RequestId, int] = field(default_factory=dict)
    """Tokens that dispatched requests will take and that no report contains yet."""
    claimed_tokens: int = 0
    long: set[RequestId] = field(default_factory=set)
    """Dispatched requests that are larger than the device."""
    window_tokens: int = 0
    """Last report: slots for which the window of one of them has memory. Who waits inside the engine gets it."""
    settled: list[RequestId] = field(default_factory=list)
    """Requests whose prefill is done: the next report contains their memory."""
    extra_waiting: int = 0
    ahead: int = 1
    """Last report: steps' worth of prompts that it may have at once."""
    last_token_clock_s: float = 0.0
    token_time: TokenTime = field(default_factory=TokenTime)
    turns: PromptTurns = field(init=False)
    shares_device: bool = False
    """It is counted among the engines that prefill."""

    def __post_init__(self) -> None:
        minds = self.up.prefer is not Prefer.TTFT and not self.up.fair
        self.turns = PromptTurns(self.up.slo_tpot_s if minds else float("inf"))

    def can_start(self) -> bool:
        """A request dispatched now would be in the next prefill step that can begin: no queue inside, room in batch and
        chunk. Where requests take turns one that is new is in the next round, whoever else is there."""
        if self.draining or self.backlog_tokens >= self.ahead * self.up.chunk_tokens:
            return False
        return self.up.fair or (self.extra_waiting == 0 and len(self.in_flight) < self.up.max_running)

    def spare_tokens(self) -> int:
        """Slots that the engine has without new device memory and that nobody has claimed (may be negative)."""
        return (self.free_tokens or 0) - self.claimed_tokens

    def device_claim_bytes(self) -> int:
        """Device memory that already dispatched requests will still take."""
        if not self.up.elastic or self.up.fair:
            return 0
        return self._pages_bytes(max(0, -self.spare_tokens()))

    def _pages_bytes(self, tokens: int) -> int:
        """Device memory of ``tokens``, in whole pages."""
        page_bytes = self.up.kv_page_bytes
        return -(-tokens * self.up.kv_bytes_per_token // page_bytes) * page_bytes

    def need_bytes(self, tokens: int) -> int | None:
        """Device memory that ``tokens`` more would take now; None when a fixed share has no room for them. None is
        taken where requests take turns: others make room."""
        if self.up.fair:
            return 0
        # Of an elastic engine the window's memory is in the device's free memory already, like what it caches.
        window_tokens = 0 if self.up.elastic else self.window_tokens
        missing = tokens - max(0, self.spare_tokens() + window_tokens)
        if missing <= 0:
            return 0
        if self.up.elastic:
            return self._pages_bytes(missing)
        return 0 if self.free_tokens is None else None

    def is_long(self, request: Request) -> bool:
        """Whether it is served with its KV outside of the device."""
        most = self.up.device_tokens
        return most > 0 and goes_long(request.kv_tokens, request.max_new_tokens or 1 << 30, most)

    def claim_tokens(self, request: Request, reserve_tokens: int) -> int:
        """Tokens for which it needs device memory; ``reserve_tokens``: what is kept for its answer. Requests that are
        larger than the device have one window, one after the other."""
        if self.is_long(request):
            return 0 if self.long else self.up.device_tokens // WINDOW_SHARE
        return request.prefill_tokens + min(reserve_tokens, request.max_new_tokens or 1 << 30)

    def _backlog_of(self, request: Request) -> int:
        """Tokens that stand before those of others: a long request's chunks and their steps take turns."""
        return 0 if self.is_long(request) else request.prefill_tokens

    def dispatched(self, request: Request, claim_tokens: int, clock_s: float, now_s: float) -> None:
        promised = self.is_in_time(request, now_s)
        self.in_flight[request.id] = InFlight(request, clock_s, promised, now_s)
        self.promised += promised
        self.held_tokens += request.kv_tokens
        self.began_sum_s += now_s
        self.pace.note_begin(now_s)
        self.no_token_yet += 1
        self.backlog_tokens += self._backlog_of(request)
        self.turns.look(self.backlog_tokens, self.answering, now_s)
        self.claims[request.id] = claim_tokens
        self.claimed_tokens += claim_tokens
        if self.is_long(request):
            self.long.add(request.id)

    def is_in_time(self, request: Request, now_s: float) -> bool:
        """Its first token came in time, or still may, as far as anybody minds."""
        return request.is_resumed or self.up.prefer is Prefer.TPOT or now_s <= request.deadline_s

    def first_token(self, id: RequestId, clock_s: float, undisturbed_s: float, now_s: float) -> bool:
        """Its prefill is done: learn the speed. False if the request is not in its prefill here. ``undisturbed_s``: the
        device's clock of undisturbed steps."""
        entry = self.in_flight.get(id)
        if entry is None or entry.has_token:
            return False
        entry.has_token, entry.first_token_s, entry.undisturbed_s = True, now_s, undisturbed_s
        self.answering += 1
        self.first_token_sum_s += now_s
        self.undisturbed_sum_s += undisturbed_s
        self.served += 1
        if entry.promised and not self.is_in_time(entry.request, now_s):
            entry.promised = False
            self.promised -= 1
        self.growth_tokens += self.growth_of(entry.request)
        self._leave_backlog(entry)
        self.turns.look(self.backlog_tokens, self.answering, now_s)
        entry.stood_s = self.turns.stood_s(now_s)
        busy_s = clock_s - max(entry.dispatched_clock_s, self.last_token_clock_s)
        if not self.is_long(entry.request):
            self.speed.observe(entry.request.prefill_tokens, max(0.0, busy_s))
        self.last_token_clock_s = clock_s
        self.settled.append(id)
        return True

    def gone(self, id: RequestId, now_s: float) -> InFlight | None:
        """The request left the engine, finished or not."""
        entry = self.in_flight.pop(id, None)
        if entry is None:
            return None
        self.promised -= entry.promised
        self.held_tokens -= entry.request.kv_tokens
        self.began_sum_s -= entry.began_s
        if entry.has_token:
            self.growth_tokens -= self.growth_of(entry.request)
            self.answering -= 1
            self.first_token_sum_s -= entry.first_token_s
            self.undisturbed_sum_s -= entry.undisturbed_s
        else:
            self._leave_backlog(entry)
        self.turns.look(self.backlog_tokens, self.answering, now_s)
        self._drop_claim(id)
        self.long.discard(id)
        return entry

    def answered(self, id: RequestId, generated_tokens: int, now_s: float) -> EndedAnswer | None:
        """The request's last token is out, ``generated_tokens`` of all attempts: learn what a token takes. None: it
        says nothing."""
        entry = self.in_flight.get(id)
        if entry is None or not entry.has_token:
            return None
        tokens = generated_tokens - entry.request.generated_tokens - 1
        if tokens <= 0 or now_s <= entry.first_token_s:
            return None
        answered_s = now_s - entry.first_token_s
        self.token_time.observe(tokens, answered_s, now_s)
        self.turns.learn(tokens, answered_s - self.turns.stood_s(now_s) + entry.stood_s, now_s)
        self.pace.note_answer(now_s - entry.began_s)
        return EndedAnswer(tokens, entry.undisturbed_s)

    def disturbed(self, undisturbed_s: float, now_s: float) -> float | None:
        """How many times slower than undisturbed its answers came so far, on average; None: nothing has come.
        ``undisturbed_s``: the device's clock."""
        ran_s = now_s * self.answering - self.first_token_sum_s
        alone_s = undisturbed_s * self.answering - self.undisturbed_sum_s
        return ran_s / alone_s if self.answering and ran_s > _NOTHING_S and alone_s > _NOTHING_S else None

    def growth_of(self, request: Request) -> int:
        """Tokens kept for a running request: it is halfway through its answer on average, and has to get by until
        others end. One that is larger than the device grows outside of it."""
        if self.is_long(request):
            return 0
        if not request.max_new_tokens:
            return self.reserve_tokens
        return min(self.reserve_tokens, -(-request.max_new_tokens // 2))

    def take_load(self, load: EngineLoad) -> None:
        """The engine has told its counters."""
        # What an elastic engine caches is in the device's free memory already, for whoever asks first.
        cached = load.cached_kv_tokens if self.up.elastic else 0
        self.free_tokens = load.free_kv_tokens - cached
        self.extra_waiting = max(0, load.waiting - self.no_token_yet)
        self.window_tokens, self.ahead = load.window_tokens, load.ahead
        if self.window_tokens:  # long before the first token of its prompt
            for id in self.long:
                self._drop_claim(id)
        self.settle_claims()

    def settle_claims(self) -> None:
        """A report came that contains the memory of all finished prefills."""
        for id in self.settled:
            self._drop_claim(id)
        self.settled.clear()

    def _leave_backlog(self, entry: InFlight) -> None:
        self.no_token_yet -= 1
        self.backlog_tokens -= self._backlog_of(entry.request)

    def _drop_claim(self, id: RequestId) -> None:
        self.claimed_tokens -= self.claims.pop(id, 0)
