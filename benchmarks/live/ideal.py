"""What a burst beside a multicast could have at best: the bound that benchmarks.live.machines is held against.

    python -m benchmarks.live.ideal

Counted from what that benchmark declares, nothing runs: engines that lose no moment, prompts before all answers, no
message that takes time. Where sources only send, nothing is served until the receivers have all layers between them,
and then by all of them at full speed: that is when each has what all need to run layers (:data:`SHARED`) and its part
of the rest. Where sources serve they begin at once, and each new instance runs what has come: with a part f of the
layers there, n sources and r receivers do the work of min(n + r, n / (1 - f)) engines, since only sources run what is
missing.

Load-then-serve is counted alike: what serves at the burst's beginning does so until the multicast's end, then everybody
does. Its P90 over the other's is the most that serving early can gain. Where sources serve that is at most
1 / (1 - 1/e) = 1.58 with more receivers than sources, for a burst of which these alone would have begun nine tenths
just when the multicast ends: of a smaller one there is less to hand over, a larger one is begun by everybody, after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from benchmarks.live.many_layers import LAYERS

PACE_US: Final = {"layer": 3000, "prefill_token": 1200, "decode_sequence": 50}
PROMPT_TOKENS: Final = 4
STEP_TOKENS: Final = 16
"""Of a prefill: four requests begin together, not all."""
SHARED: Final = 5 / 61
"""Of the model's leaves: the first layer, in whose block is what layers share, as every member of a pipeline has it
first; embedding and head come to one of each at once."""
RECEIVERS, REQUESTS = 4, 50
MULTICAST_S: Final = 5.5
STEP_S: Final = 1e-3


class Engines(Protocol):
    """How many engines' worth of work is done at a time."""

    def __call__(self, sources: int, at_s: float, receivers: int = ..., end_s: float = ...) -> float: ...


def work_s(requests: int = REQUESTS) -> float:
    """One engine's time for all prompts."""
    tokens = requests * PROMPT_TOKENS
    us = LAYERS * (-(-tokens // STEP_TOKENS) * PACE_US["layer"] + tokens * PACE_US["prefill_token"])
    return us / 1e6


def sending(sources: int, at_s: float, receivers: int = RECEIVERS, end_s: float = MULTICAST_S) -> float:
    """Engines' worth of work at that time where sources only send, to so many until the multicast's end."""
    parts = min(sources, receivers)
    return receivers if at_s >= end_s * (1 + (parts - 1) * SHARED) / parts else 0.0


def serving(sources: int, at_s: float, receivers: int = RECEIVERS, end_s: float = MULTICAST_S) -> float:
    """And where they serve."""
    missing = 1 - min(1.0, at_s / end_s)
    return min(sources + receivers, sources / missing if missing else float("inf"))


def stopping(
    engines: Engines, sources: int, at_s: float, receivers: int = RECEIVERS, end_s: float = MULTICAST_S
) -> float:
    """And of load-then-serve, where sources are those of ``engines`` (:func:`sending` or :func:`serving`)."""
    return engines(sources, at_s if at_s >= end_s else 0.0, receivers, end_s)


def begun_s(capacity: Callable[[float], float], share: float, requests: int = REQUESTS) -> float:
    """When so much of the burst has its first tokens."""
    steps, done_s = 0, 0.0
    while done_s < share * work_s(requests):
        done_s += STEP_S * capacity(steps * STEP_S)
        steps += 1
    return steps * STEP_S


CASES: Final[tuple[tuple[int, str, Engines], ...]] = (
    (4, "only send", sending),
    (2, "only send", sending),
    (1, "serve", serving),
    (2, "serve", serving),
)


def main() -> None:
    print(f"one engine: {work_s():.2f} s; the multicast: {MULTICAST_S} s")
    print("\n| sources | they | receivers | load-then-serve p90, last | serving early p90, last | p90, at most |")
    print("|---|---|---|---|---|---|")
    for sources, they, engines in CASES:
        for receivers in (RECEIVERS, 2 * RECEIVERS):
            early, late = (
                [begun_s(partial(way, sources, receivers=receivers), share) for share in (0.9, 1.0)]
                for way in (engines, partial(stopping, engines))
            )
            times = " | ".join(f"{p90:.2f}, {last:.2f}" for p90, last in (late, early))
            print(f"| {sources} | {they} | {receivers} | {times} | {late[0] / early[0]:.2f} |")


if __name__ == "__main__":
    main()
