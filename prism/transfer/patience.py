"""How long a receiver keeps to the plan, and whom it trusts: measured against the expected step and the other peers.

Three questions, answered from what came so far:

- *Has the plan slipped?* Every piece has a time: that of its step, on the measured step time. Once the piece at hand is
  ``SLIP_STEPS`` behind it, this receiver leaves the plan and takes pieces wherever they are. The times follow what
  comes a little late: where everybody is, as on a machine that had something else to do, to leave would make it worse.
- *Is a transfer slow?* It is when half of it took ``SLOW_FACTOR`` times what it takes at the best rate of the other
  peers or, before three were measured, at the rate the plan expects. Where all are equally slow nobody is: changing
  would not help.
- *Who is trusted?* A peer that was slow or dead is asked only when nobody else has the piece, for a time that doubles.

A state machine without clock or I/O: times come in as arguments. Not for several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Final

SLIP_STEPS: Final = 2.5
MIN_SLIP_S: Final = 0.5
"""Below this lateness says more about the machine's scheduling than about a peer."""
FIRST_SLIP_S: Final = 0.1
"""More for the first piece: nodes do not begin at the same moment."""
UNKNOWN_S: Final = 1.0
"""In place of everything derived from the step time while that is unknown: for each step, and at least."""
UNKNOWN_BYTES_S: Final = 12.5e6
"""A link of which nothing is known may be as slow as this."""
STRETCH: Final = 1.15
"""Steps may take so much longer than transfers without anybody being late."""
FOLLOW: Final = 0.25
"""So much of what a piece was late moves the times of the next ones: those that take up to 1.7 steps each are no
reason to leave the plan, those that take three are with the third."""
SLOW_FACTOR: Final = 3.0
MIN_SLOW_S: Final = 0.1
BACK_OFF_S: Final = 1.0
DEAD_BACK_OFF_S: Final = 8.0
"""To ask one that is dead costs the silence after which it counts as dead."""
KNOWN_PEERS: Final = 3
"""So many peers say together what the network's rate is; until so many were measured the plan has a say, too."""
PLAN_FACTOR: Final = 2.0
"""The plan may be so wrong about the network without anybody being blamed for it."""
NOTED_BYTES: Final = 64 << 10
"""Less says nothing about a rate."""


class Patience:
    """``steps``: the step of each piece this node gets by the plan; ``piece_s``: what the plan expects a piece of
    ``piece_bytes`` to take on a link (0: nobody knows); ``peers``: how many there are; ``near``: those of them that
    have other links to this node, whose rates say nothing of what the others' should be."""

    def __init__(
        self,
        steps: Mapping[int, int],
        piece_s: float,
        piece_bytes: float,
        peers: int = KNOWN_PEERS + 1,
        near: Collection[str] = (),
    ) -> None:
        self._steps, self._piece_s = steps, piece_s
        self._unknown_s = max(UNKNOWN_S, piece_bytes / UNKNOWN_BYTES_S)
        self._planned_rate = piece_bytes / piece_s if piece_s > 0 else 0.0
        self._near = frozenset(near)
        self._peers = peers - len(self._near)
        self._durations: list[float] = []
        self._step_zero_s = float("inf")
        self._anchored = False
        self._rates: dict[str, float] = {}
        self._blamed: dict[str, tuple[int, float]] = {}

    # --- the plan's time ---

    def begin_pulling(self, now_s: float) -> None:
        """Pulling begins."""
        self._step_zero_s = now_s

    @property
    def typical_s(self) -> float:
        """What one piece takes; 0: unknown."""
        known = len(self._durations) >= (2 if self._piece_s > 0 else 1)
        return median(self._durations) if known else self._piece_s

    def on_piece(self, piece: int, source: str, nbytes: int, took_s: float, now_s: float) -> None:
        """A whole piece, of which ``nbytes`` came from ``source`` in ``took_s``."""
        if source not in self._near:
            self._durations.append(took_s)
        self._rate(source, nbytes, took_s)
        step = self._steps.get(piece)
        if step is None:
            return
        if not self._anchored:  # when the others began is known from here on
            self._anchored = True
            self._step_zero_s = max(self._step_zero_s, now_s - (step + 1) * self.typical_s)
        late_s = now_s - self._due_s(step)
        if 0 < late_s < self._slack_s:
            self._step_zero_s += FOLLOW * late_s

    def slips_at_s(self, piece: int | None) -> float:
        """When the plan counts as slipped unless ``piece``, the one at hand, is complete by then."""
        if piece is None or piece not in self._steps:
            return float("inf")
        step_s = self.typical_s
        if step_s <= 0:
            return self._step_zero_s + (self._steps[piece] + 1) * self._unknown_s
        return self._due_s(self._steps[piece]) + self._slack_s + (0.0 if self._anchored else FIRST_SLIP_S)

    def _due_s(self, step: int) -> float:
        return self._step_zero_s + (step + 1) * self.typical_s * STRETCH

    @property
    def _slack_s(self) -> float:
        return max(SLIP_STEPS * self.typical_s, MIN_SLIP_S)

    def turn_s(self) -> float:
        """How long a pull queues at one holder before it is looked for elsewhere."""
        return self._slack_s

    # --- rates ---

    def half_s(self, source: str, nbytes: int) -> float:
        """How long the first half of ``nbytes`` may take before ``source`` counts as slow."""
        rate = self._others_rate(source)
        if rate <= 0:
            return max(UNKNOWN_S, nbytes / 2 / UNKNOWN_BYTES_S)
        return max(SLOW_FACTOR * nbytes / 2 / rate, MIN_SLOW_S)

    def _others_rate(self, source: str) -> float:
        others = [rate for node, rate in self._rates.items() if node != source]
        known = len(others) >= min(KNOWN_PEERS, self._peers - 1)
        return max([*others, *([] if known else [self._planned_rate / PLAN_FACTOR])], default=0.0)

    def _rate(self, source: str, nbytes: int, took_s: float) -> None:
        if nbytes >= NOTED_BYTES and took_s > 0 and source not in self._near:
            self._rates[source] = nbytes / took_s

    # --- trust ---

    def blame(self, source: str, now_s: float, nbytes: int = 0, took_s: float = 0.0) -> None:
        """``source`` failed (0 s), or was slow: ``nbytes`` in ``took_s``."""
        self._rate(source, nbytes, took_s)
        times = self._blamed.get(source, (0, 0.0))[0] + 1
        pause_s = max(BACK_OFF_S if took_s > 0 else DEAD_BACK_OFF_S, 10 * self.typical_s)
        self._blamed[source] = times, now_s + pause_s * 2 ** min(times - 1, 10)

    def trusts(self, source: str, now_s: float) -> bool:
        return now_s >= self._blamed.get(source, (0, 0.0))[1]

    def forgive_if_equal(self, source: str) -> None:
        """Withdraws the blame for slowness where the others turned out to be no faster."""
        rate = self._rates.get(source, 0.0)
        if source in self._blamed and rate * SLOW_FACTOR >= self._others_rate(source) > 0:
            del self._blamed[source]
