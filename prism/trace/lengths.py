"""Length tables: quantiles of prompt and output lengths of public traces, and drawing from them.

The numbers are summaries that anybody can compute from the public originals named beside them. A draw inverts the
distribution function (log-linear between quantiles, as lengths are heavy-tailed); prompt and output are tied by a
Gaussian copula with the rank correlation of the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sin, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from prism.core.errors import InvalidValue

LEVELS: Final = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles at :data:`LEVELS`, in tokens. ``rank_correlation`` is Spearman's."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    rank_correlation: float

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """One ``(prompt_tokens, output_tokens)``, each at least 1."""
        rho = 2 * sin(pi / 6 * self.rank_correlation)
        a, b = rng.standard_normal(2)
        b = rho * a + sqrt(1 - rho * rho) * b
        return quantile(self.prompt, _NORMAL.cdf(float(a))), quantile(self.output, _NORMAL.cdf(float(b)))


def quantile(table: tuple[int, ...], level: float) -> int:
    """The length at ``level`` (0..1) of a table of quantiles."""
    return max(1, round(float(np.exp(np.interp(level, LEVELS, np.log(table))))))


def length_table(name: str) -> LengthTable:
    """The table called ``name``. Raises :class:`InvalidValue` naming those there are."""
    try:
        return TABLES[name]
    except KeyError:
        raise InvalidValue("lengths", name, "unknown length table", list(TABLES)) from None


_TABLES: Final = (
    # Chatbot Arena, the sample in Prism's and VTC's artifacts
    LengthTable(
        "arena",
        (2, 2, 2, 5, 13, 40, 161, 432, 653, 902, 1021),
        (2, 3, 10, 17, 62, 211, 458, 513, 513, 785, 977),
        0.26,
    ),
    # ShareGPT conversations up to 8k tokens, history included (sarathi-serve)
    LengthTable(
        "sharegpt",
        (1, 12, 29, 74, 580, 1730, 3734, 5696, 6563, 7433, 8141),
        (2, 6, 44, 84, 228, 415, 628, 834, 920, 998, 1024),
        0.05,
    ),
    # arXiv summarisation up to 4k tokens (vidur)
    LengthTable(
        "arxiv",
        (1, 73, 748, 1242, 1986, 2730, 3370, 3702, 3813, 3933, 4054),
        (5, 36, 60, 78, 115, 167, 242, 372, 736, 3271, 4056),
        -0.11,
    ),
    # Azure LLM inference trace 2023, conversation
    LengthTable(
        "azure-conv",
        (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
        0.07,
    ),
    # Mooncake FAST'25, conversation
    LengthTable(
        "mooncake",
        (891, 894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 126195),
        (1, 3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000),
        0.07,
    ),
    # ServeGen's measured clients of at most 3 requests/s, two hours
    LengthTable(
        "servegen",
        (9, 64, 153, 226, 326, 718, 1486, 2054, 3298, 8227, 30504),
        (1, 1, 1, 1, 9, 50, 113, 357, 493, 752, 8174),
        0.23,
    ),
)
TABLES: Final = {table.name: table for table in _TABLES}
