"""Completely fair scheduling of one engine's requests (AQUA, section 7): least service first, within its memory.

Each round of ``ROUND_STEPS`` steps the batch of ``b`` tokens is divided: ``d`` decode slots, as many as there are
requests that fit into memory together, and ``p = b - d`` tokens of prompts::

    1  p is filled with prompts, least prefilled first
    2  d is filled with requests that decode, least service first
    3  decode slots that are left go to prompts
       each time: as far as memory reaches; who does not fit is passed over

    | overdue | prompts: p tokens | decoding: d slots | prompts: what is left of d |

Service is what a request was given *while others were there*: one that begins (to prefill, to decode) starts at the
least service of those present, so that it neither waits for them to finish nor is served alone until it has as much.

Among those who decode, who is in keeps its place for a *turn*: until it was given so much more than who waits for it
(:func:`turn_tokens`). Of two with answers alike, changing places in the middle ends neither sooner and one later.
Prompts take places at every round, so that first tokens do not wait for turns; whose KV is largest makes room, since
one makes it for several prompts then, and few answers are interrupted.

The paper's order alone can starve: prompts go before decoding, and newcomers at the least service before whoever has
more. So a request that was left out for as many rounds as there are requests, its share, and those of a turn, which
this must not cut short, goes before all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ROUND_STEPS: Final = 5
"""A round: after so many steps, or when a request ends, the batch is chosen anew (the paper's ``k``)."""
MOST_TURN_TOKENS: Final = 1024
"""Whoever is out has none of its answer meanwhile. Longer than usual answers are (half of ShareGPT's have more than 400
tokens): turns that end inside most answers delay most requests."""
_TURN_ANSWERS: Final = 2
"""Usual answers to a turn. Usual is the mean, which half of the answers exceed; twice that, one of twenty does."""
_PAGED_SHARE: Final = 0.1
"""Of a turn, the time its copies may take."""
_REMEMBERED_ANSWERS: Final = 64
"""About so many say what a usual one is."""


@dataclass(frozen=True, slots=True)
class FairRequest:
    """A request as a round finds it."""

    id: str
    service_tokens: int
    """Prefilled, or generated if it decodes; counted from where it began (:class:`ServiceBook`)."""
    kv_tokens: int
    """Memory it takes while it is in: of what is computed, wherever that lies now, and of the round's growth."""
    prompt_tokens: int
    """Still to prefill; 0: it decodes."""
    resident: bool
    """Its KV is in the engine now."""
    left_out: int = 0
    """Rounds in a row in which it was here and not chosen."""

    @property
    def decodes(self) -> bool:
        return self.prompt_tokens == 0


@dataclass(frozen=True, slots=True)
class FairBatch:
    """Who is in the engine until the next round; everybody else's KV is paged out."""

    decoding: tuple[str, ...]
    prefilling: tuple[str, ...]
    """In the order in which they get prompt tokens."""

    @property
    def members(self) -> frozenset[str]:
        return frozenset((*self.decoding, *self.prefilling))


@dataclass(frozen=True, slots=True)
class FairRoom:
    """What a round can give."""

    memory_tokens: int
    """KV of the engine's requests together."""
    batch_tokens: int
    """``b``."""
    most_requests: int
    turn_tokens: int = 0
    """What who decodes is given more than who waits before it makes room."""


class _Filling:
    """A batch in the making: what is left of the room."""

    def __init__(self, room: FairRoom) -> None:
        self.memory_tokens, self.requests = room.memory_tokens, room.most_requests
        self.decoding: list[str] = []
        self.prefilling: list[str] = []
        self.prompt_tokens = 0

    def take(self, request: FairRequest) -> bool:
        if request.kv_tokens > self.memory_tokens or self.requests == 0:
            return False
        self.memory_tokens -= request.kv_tokens
        self.requests -= 1
        (self.decoding if request.decodes else self.prefilling).append(request.id)
        self.prompt_tokens += request.prompt_tokens
        return True


def plan_round(requests: Sequence[FairRequest], room: FairRoom) -> FairBatch:
    """The batch of the next round. ``requests`` in order of arrival, which decides between equals after residency:
    who is in stays in. Whoever fits the memory alone is chosen at the latest in the round after it was left out for
    twice as many rounds as there are requests, and the rounds of a turn."""
    filling = _Filling(room)
    share = len(requests) + room.turn_tokens // ROUND_STEPS
    overdue = sorted((r for r in requests if r.left_out >= share), key=lambda r: -r.left_out)
    chosen = {r.id for r in overdue if filling.take(r)}
    least = _least_waiting(requests)
    others = sorted((r for r in requests if r.id not in chosen), key=lambda r: _standing(r, least + room.turn_tokens))
    slots = _decode_slots(requests, room)
    prompts = [r for r in others if not r.decodes]
    waiting = _fill_prompts(filling, prompts, room.batch_tokens - slots)
    for request in others:
        if request.decodes and len(filling.decoding) < slots:
            filling.take(request)
    _fill_prompts(filling, waiting, room.batch_tokens - len(filling.decoding))
    return FairBatch(tuple(filling.decoding), tuple(filling.prefilling))


def _least_waiting(requests: Sequence[FairRequest]) -> int:
    """The least service of those who decode and are out, or of all who decode if none is out."""
    decoding = [r for r in requests if r.decodes]
    out = [r for r in decoding if not r.resident]
    return min((r.service_tokens for r in out or decoding), default=0)


def _standing(request: FairRequest, turn_ends: int) -> tuple[int, int, int]:
    """Sorts: those whose turn it is, who takes least memory first, and of those who take as much who is furthest in
    its turn; then by service, and who is in before others."""
    if request.decodes and request.resident and request.service_tokens <= turn_ends:
        return 0, request.kv_tokens, -request.service_tokens
    return 1, request.service_tokens, int(not request.resident)


def turn_tokens(usual_answer_tokens: float, trip_s: float, step_s: float) -> int:
    """How long a turn is: few answers are cut up, and paging a request out and in (``trip_s``) is a small part of the
    steps (``step_s`` each) that it is given for it."""
    paid_steps = trip_s / (_PAGED_SHARE * step_s) if step_s > 0 else 0.0
    return min(MOST_TURN_TOKENS, max(ROUND_STEPS, math.ceil(max(_TURN_ANSWERS * usual_answer_tokens, paid_steps))))


def _decode_slots(requests: Iterable[FairRequest], room: FairRoom) -> int:
    """``d``: how many requests fit into memory together. At most all but one token of the batch: a prompt moves on."""
    left, slots = room.memory_tokens, 0
    for tokens in sorted(r.kv_tokens for r in requests):
        left -= tokens
        if left < 0:
            break
        slots += 1
    return min(slots, room.most_requests, max(1, room.batch_tokens - 1))


def _fill_prompts(filling: _Filling, prompts: Sequence[FairRequest], tokens: int) -> list[FairRequest]:
    """Take ``prompts`` until theirs are ``tokens``; returns those that were not taken."""
    return [r for r in prompts if filling.prompt_tokens >= tokens or not filling.take(r)]


def expected_left(given_tokens: int, most_tokens: int, usual_answer_tokens: float) -> int:
    """Tokens an answer of ``most_tokens`` at most still has, it is taken: up to a usual one; of one that is longer as
    many again as it has, since those that are long are mostly longer still. ``usual_answer_tokens`` 0: not known."""
    most = max(1, most_tokens - given_tokens)
    if usual_answer_tokens <= 0:
        return most
    return max(1, min(most, math.ceil(max(usual_answer_tokens - given_tokens, given_tokens))))


class UsualAnswer:
    """How long answers are on average: all tokens that were generated, by how many answers ended. Those that still run
    count with what they have: short ones end first, and would be taken for the usual ones otherwise."""

    def __init__(self) -> None:
        self._ended = self._tokens = 0.0

    def note(self, tokens: int) -> None:
        """An answer of so many has ended."""
        left = 1 - 1 / _REMEMBERED_ANSWERS
        self._ended, self._tokens = left * self._ended + 1, left * self._tokens + tokens

    def tokens(self, running_tokens: int) -> float:
        """``running_tokens``: of all answers that have not ended together. 0.0: none has ended yet."""
        return (self._tokens + running_tokens) / self._ended if self._ended else 0.0


class ServiceBook:
    """Where each request began to be counted, and for how long it has been left out."""

    def __init__(self) -> None:
        self._start: dict[tuple[str, bool], int] = {}
        self._left_out: dict[str, int] = {}

    def service(self, id: str, decodes: bool, given_tokens: int) -> int:
        """What ``id`` was given in its phase, on the scale of those present; :meth:`enter` comes first."""
        return self._start[id, decodes] + given_tokens

    def left_out(self, id: str) -> int:
        return self._left_out.get(id, 0)

    def enter(self, present: Sequence[tuple[str, bool, int]]) -> None:
        """``present``: everyone's (id, decodes, tokens given in this phase). Who is new in its phase starts at the
        least service of those there in it; who is gone is forgotten."""
        known = {(id, decodes) for id, decodes, _ in present}
        self._start = {key: start for key, start in self._start.items() if key in known}
        for phase in (False, True):
            here = [(id, given) for id, decodes, given in present if decodes is phase]
            least = min((self._start[id, phase] + given for id, given in here if (id, phase) in self._start), default=0)
            for id, given in here:
                self._start.setdefault((id, phase), least - given)
        ids = {id for id, _ in known}
        self._left_out = {id: rounds for id, rounds in self._left_out.items() if id in ids}

    def note_round(self, present: Iterable[str], batch: FairBatch) -> None:
        members = batch.members
        self._left_out = {id: 0 if id in members else self.left_out(id) + 1 for id in present}


@dataclass(frozen=True, slots=True)
class Switch:
    """What the next round's change of places would cost, and what waiting instead would."""

    copy_s: float
    """Paging out who leaves and in who enters, or computing it where that is faster."""
    delayed: int
    """Requests that are held up by it: those who leave, and where copies do not go beside steps all others, too."""
    entering: int
    wait_s: float
    """How long those who enter would wait for a place otherwise: until the first request in the engine ends."""


def paging_pays(switch: Switch) -> bool:
    """Whether the time that those who enter are spared is more than what the copies hold up (AQUA, end of section 7:
    first come first served where context switches cost too much). Short answers make places soon, slow links copy
    long."""
    return switch.entering > 0 and switch.copy_s * switch.delayed < switch.wait_s * switch.entering


class ReturnSteps:
    """When who comes back is let in. Its last token is computed in a step that holds up all who run, as one of prompts
    does: it waits for a step that is taken for prompts anyway, or until those who wait for it have waited for as many
    steps, together, as it holds up others. Whatever comes, that costs twice the best choice at most (rent or buy)."""

    def __init__(self) -> None:
        self._waited = 0

    def due(self, returning: int, running: int, prompts: bool) -> bool:
        """Whether the next step is one for the ``returning``, whose KV is there; asked once a step."""
        self._waited += returning
        is_due = returning > 0 and (prompts or self._waited >= running)
        if is_due or returning == 0:
            self._waited = 0
        return is_due
