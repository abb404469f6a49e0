"""Into how many parts a prefill is cut that runs over several engines, so that one computes a part while another has
the next (micro-batches; lambda-Scale, Figure 6a, has a pipeline's nodes compute different requests). Pure.

With stages that are alike, m parts over s of them take (m + s - 1) / (m s) of the time of the whole: 5/8 with four
parts and two stages, and half at best, however many there are. Each part costs a question, and devices compute small
ones less well.

Between two requests nothing is lost. Within one a part reads the KV of those before it once more, which costs next to
nothing beside a model's matrix products (and more on virtual devices, where SGLang's attention computes the prefix's
queries, too).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

LEAST_TOKENS: Final = 128
"""Of a part, were all alike."""
MOST_PARTS: Final = 4
"""For two engines; with each further one as many more, since that many work at once."""
_SHIFT: Final = 0.25
"""A cut may move by such a share of a part to where a request ends."""


def micro_batches(lengths: Sequence[int], engines: int) -> list[int]:
    """How many tokens each part has, in order; one part where cutting is of no use.

    ``lengths``: the new tokens of each request, in order. ``engines``: how many different ones the route leads over,
    the leader among them."""
    tokens = sum(lengths)
    parts = max(1, min(MOST_PARTS * (engines - 1), tokens // LEAST_TOKENS))
    ends = list(itertools.accumulate(lengths))
    cuts = [0]
    for part in range(1, parts):
        even = part * tokens // parts
        nearest = min(ends, key=lambda end: abs(end - even))
        cuts.append(nearest if abs(nearest - even) <= _SHIFT * tokens / parts else even)
    return [b - a for a, b in itertools.pairwise([*cuts, tokens])]
