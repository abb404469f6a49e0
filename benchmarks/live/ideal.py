"""What a burst beside a multicast could have at best: the bound that benchmarks.live.machines is held against.

    python -m benchmarks.live.ideal

Counted from what that benchmark declares, nothing runs: engines that lose no moment, prompts before all answers, no
message that takes time. Where sources only send, nothing is served until the receivers have all layers between them,
and then by all of them at full speed: that is when each has what all need to begin (:data:`FIRST`) and its part of the
rest. Where sources serve they begin at once, and each new instance runs what has come: with a part f of the layers
there, n sources and r receivers do the work of min(n + r, n / (1 - f)) engines, since only sources run what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.live.many_layers import LAYERS

PACE_US: Final = {"layer": 3000, "prefill_token": 1200, "decode_sequence": 50}
PROMPT_TOKENS: Final = 4
STEP_TOKENS: Final = 16
"""Of a prefill: four requests begin together, not all."""
FIRST: Final = 9 / 61
"""Of the model's leaves: embedding, first layer and head, in the order in which they are sent."""
RECEIVERS, REQUESTS = 4, 50
MULTICAST_S: Final = 5.5
STEP_S: Final = 1e-3


def work_s(requests: int = REQUESTS) -> float:
    """One engine's time for all prompts."""
    tokens = requests * PROMPT_TOKENS
    us = LAYERS * (-(-tokens // STEP_TOKENS) * PACE_US["layer"] + tokens * PACE_US["prefill_token"])
    return us / 1e6


def sending(sources: int, at_s: float, receivers: int = RECEIVERS, end_s: float = MULTICAST_S) -> float:
    """Engines' worth of work at that time where sources only send, to so many until the multicast's end."""
    together_s = end_s * (FIRST + (1 - FIRST) / min(sources, receivers))
    return receivers if at_s >= together_s else 0.0


def serving(sources: int, at_s: float, receivers: int = RECEIVERS, end_s: float = MULTICAST_S) -> float:
    """And where they serve."""
    missing = 1 - min(1.0, at_s / end_s)
    return min(sources + receivers, sources / missing if missing else float("inf"))


def begun_s(capacity: Callable[[float], float], share: float, requests: int = REQUESTS) -> float:
    """When so much of the burst has its first tokens."""
    steps, done_s = 0, 0.0
    while done_s < share * work_s(requests):
        done_s += STEP_S * capacity(steps * STEP_S)
        steps += 1
    return steps * STEP_S


def main() -> None:
    print(f"one engine: {work_s():.2f} s; the multicast: {MULTICAST_S} s")
    print("\n| sources | they | p90 | last |\n|---|---|---|---|")
    for sources, they, capacity in (
        (4, "only send", sending),
        (2, "only send", sending),
        (1, "serve", serving),
        (2, "serve", serving),
    ):
        p90_s, last_s = (begun_s(partial(capacity, sources), share) for share in (0.9, 1.0))
        print(f"| {sources} | {they} | {p90_s:.2f} | {last_s:.2f} |")


if __name__ == "__main__":
    main()
