"""Who may pull from this node next: the order that keeps a multicast at its schedule's floor.

A schedule is only as fast as its order is kept: two receivers that pull from one source at once both take twice as
long, and everything behind them slips. So a source lets one pull through at a time, in the plan's order, and the next
when the last is complete at the receiver. The order bends where keeping it would stall:

- the next transfer of the plan is waited for only ``patience_s`` when another could go ahead; a receiver that was late
  is not waited for again until it asks, a piece that this node lacks not until it is here. A receiver asks in the
  plan's order, so that what it left out (it has that already, or the piece is empty) is not waited for at all;
- a transfer that takes longer than ``slow_s`` no longer holds the others back (a slow link, or a dead receiver), nor do
  later ones of the same receiver: they run beside the others, one at a time, and begin so seldom while others wait that
  they take a quarter of this node's link at most. A receiver that keeps up again is one like the others again;
- a receiver that is *near*, over links of its own to this node, waits for nobody and nobody for it;
- a receiver that has left the plan is not waited for. What it pulls, and what joiners do, goes when the plan has
  nothing ready, and every fourth time at least; first what fewest got from here.

A state machine without clock or I/O: times come in as arguments, decisions go out as values. Not for several threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Final

Pull = tuple[str, int]
"""(who asks, which piece)."""

EXTRA_EVERY: Final = 4
ASIDE_EVERY: Final = 4
"""Pieces' times between two transfers to slow receivers while others wait: a piece takes one of them from the link."""
MIN_PATIENCE_S: Final = 0.005
MAX_PATIENCE_S: Final = 0.25
UNKNOWN_SLOW_S: Final = 1.0
"""A transfer is slow after this long as long as no other has been timed and the plan says nothing ..."""
MIN_SLOW_S: Final = 0.1
"""... and never before."""


class Grants:
    """The pulls of one session at one source. ``holds(piece)``: does this node have it? ``piece_s``: what the plan
    expects a transfer to take; what transfers really take replaces it as they end."""

    def __init__(self, holds: Callable[[int], bool], piece_s: float = 0.0, order: Sequence[Pull] = ()) -> None:
        self._holds, self._piece_s = holds, piece_s
        self._durations: list[float] = []
        self._near: frozenset[str] = frozenset()
        self._asked: dict[Pull, float] = {}
        self._active: dict[Pull, float] = {}
        self._over: set[Pull] = set()
        self._late: set[str] = set()
        self._slow: set[str] = set()
        self._aside_s = float("-inf")
        self._extra: set[Pull] = set()
        self._missing: set[int] = set()
        self._idle_since_s = float("-inf")
        self._since_extra = 0
        self._copies: Counter[int] = Counter()
        self.follow(order)

    def follow(self, order: Sequence[Pull], piece_s: float | None = None, near: Collection[str] = ()) -> None:
        """This node's part of the plan, and who is near; may come after the first pulls were asked for."""
        self._near = frozenset(near)
        if piece_s is not None:
            self._piece_s = piece_s
        self._order = list(order)
        self._place = {pull: i for i, pull in enumerate(self._order)}
        self._head = 0
        self._reached: dict[str, int] = {}
        """By receiver the furthest place in the plan that it asked for."""
        for pull in [*self._over, *self._active, *self._asked]:
            if pull not in self._extra:
                self._reach(pull)

    @property
    def waiting(self) -> int:
        """Pulls that want or have this node's link; those of slow receivers, which leave most of it free, do not count
        while there are others."""
        pulls = [pull for pull in (*self._asked, *self._active) if pull[0] not in self._near]
        return sum(who not in self._slow for who, _ in pulls) or len(pulls)

    @property
    def slow(self) -> frozenset[str]:
        """Receivers whose transfers were slow."""
        return frozenset(self._slow)

    @property
    def patience_s(self) -> float:
        return min(max(self._typical_s() / 2, MIN_PATIENCE_S), MAX_PATIENCE_S)

    @property
    def slow_s(self) -> float:
        """A transfer that has the link for itself is slow after this long."""
        typical_s = self._typical_s()
        return max(2 * typical_s, MIN_SLOW_S) if typical_s > 0 else UNKNOWN_SLOW_S

    def _typical_s(self) -> float:
        return median(self._durations[-9:]) if self._durations else self._piece_s

    def ask(self, pull: Pull, now_s: float, scheduled: bool = True) -> None:
        """``pull`` wants to start; :meth:`end` ends it in any case. One that is not ``scheduled`` is by a receiver that
        has left the plan, or never had a part in it."""
        self._asked[pull] = now_s
        if scheduled:
            self._late.discard(pull[0])
            self._reach(pull)
        else:
            self._late.add(pull[0])
            self._extra.add(pull)

    def _reach(self, pull: Pull) -> None:
        self._reached[pull[0]] = max(self._reached.get(pull[0], -1), self._place.get(pull, -1))

    def end(self, pull: Pull, now_s: float, complete: bool) -> None:
        """``pull`` is complete, or withdrawn (its receiver may ask again)."""
        among = len(self._active)
        started = self._active.pop(pull, None)
        if started is not None:
            self._idle_since_s = now_s
            if complete:
                self._time(pull[0], now_s - started, among)
        self._asked.pop(pull, None)
        self._extra.discard(pull)
        if complete:
            self._over.add(pull)

    def _time(self, who: str, took_s: float, among: int) -> None:
        """A transfer to ``who`` took so long; ``among`` were under way at its end. Two that share the link fairly take
        twice as long each, which is no sign of a slow receiver."""
        if took_s < self.slow_s * (1.0 if among == 1 else 1.1):
            self._slow.discard(who)
        if who not in self._slow or not self._durations:
            self._durations.append(took_s)

    def grant_next(self, now_s: float) -> Pull | None:
        """The pull that may start now, if any; it counts as under way from here on."""
        near = self._near_ready()
        if near is not None:
            del self._asked[near]
            return near
        limit_s = self.slow_s * len(self._active)
        self._slow.update(who for (who, _), since in self._active.items() if now_s - since >= limit_s)
        ready = [pull for pull in self._asked if self._holds(pull[1])]
        served = {who for who, _ in self._active}
        aside = next((pull for pull in ready if pull[0] in self._slow and pull[0] not in served), None)
        ready = [pull for pull in ready if pull[0] not in self._slow]
        choice = self._choose(ready, now_s) if ready and served <= self._slow else None
        if choice is None and aside is not None and self._aside_due_s(bool(ready)) <= now_s:
            choice, self._aside_s = aside, now_s
        if choice is not None:
            del self._asked[choice]
            self._active[choice] = now_s
        return choice

    def _near_ready(self) -> Pull | None:
        return next((pull for pull in self._asked if pull[0] in self._near and self._holds(pull[1])), None)

    def _aside_due_s(self, others_wait: bool) -> float:
        """From when on a slow receiver may be served beside the others: one at a time, and seldom if others wait."""
        if any(who in self._slow for who, _ in self._active):
            return float("inf")
        return self._aside_s + ASIDE_EVERY * self._typical_s() if others_wait or self._active else float("-inf")

    def quiet_s(self, now_s: float) -> float:
        """How long :meth:`grant_next` keeps saying no unless something is asked for, ends or arrives; infinite if only
        that can change it."""
        if self._near_ready() is not None:
            return 0.0
        ready = [pull for pull in self._asked if self._holds(pull[1])]
        if not ready:
            return float("inf")
        prompt = [pull for pull in ready if pull[0] not in self._slow]
        limit_s = self.slow_s * len(self._active)
        slow_at = [since + limit_s for (who, _), since in self._active.items() if who not in self._slow]
        due_s = float("inf")
        if slow_at:
            due_s = min(slow_at)
        elif prompt:
            due_s = max(self._idle_since_s, min(self._asked[pull] for pull in prompt)) + self.patience_s
        if len(prompt) < len(ready):
            due_s = min(due_s, self._aside_due_s(bool(prompt)))
        return max(due_s - now_s, 0.0)

    def _choose(self, ready: list[Pull], now_s: float) -> Pull | None:
        by_plan = [p for p in ready if p in self._place and p not in self._extra]
        planned = min(by_plan, key=self._place.__getitem__, default=None)
        extra = min((p for p in ready if p not in by_plan), key=self._extra_order, default=None)
        expected = self._expected()
        extra_turn = extra is not None and self._since_extra >= EXTRA_EVERY - 1
        if expected is not None and planned != expected and not extra_turn:
            waited_s = now_s - max(self._idle_since_s, min(self._asked[p] for p in ready))
            if waited_s < self.patience_s:
                return None
            self._give_up(expected)
        choice = extra if planned is None or extra_turn else planned
        self._since_extra = 0 if choice == extra else self._since_extra + 1
        if choice is not None:
            self._copies[choice[1]] += 1
        return choice

    def _extra_order(self, pull: Pull) -> tuple[int, float]:
        """Pieces that fewest got from here first: who has one passes it on to the others that miss it. What slow ones
        got does not count."""
        return self._copies[pull[1]], self._asked[pull]

    def _give_up(self, expected: Pull) -> None:
        if expected not in self._asked:
            self._late.add(expected[0])
        else:
            self._missing.add(expected[1])

    def _expected(self) -> Pull | None:
        """The first transfer of the plan that is neither over, nor under way, nor given up waiting for."""
        while self._head < len(self._order) and self._order[self._head] in self._over:
            self._head += 1
        for place, pull in enumerate(self._order[self._head :], self._head):
            if pull in self._over or pull in self._active:
                continue
            if (
                (pull not in self._asked and place < self._reached.get(pull[0], -1))
                or pull[0] in self._late
                or pull[0] in self._slow
                or pull[0] in self._near
                or (pull[1] in self._missing and not self._holds(pull[1]))
            ):
                continue
            return pull
        return None
