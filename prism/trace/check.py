"""What is wrong with a row, said with file, row and field. Used by every reader, converter and writer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prism.core.errors import InvalidValue
from prism.trace.row import TraceRow
from prism.trace.schema import MOST_TOKENS


class OutOfOrder(InvalidValue):
    """A row arrives before the row ahead of it."""


def check_row(row: TraceRow, where: str, last_arrival_s: float) -> None:
    """Raise :class:`InvalidValue` when ``row`` breaks the format; ``where`` is ``FILE row N``."""
    if not math.isfinite(row.arrival_s) or row.arrival_s < 0:
        raise InvalidValue("arrival_s", row.arrival_s, "must be finite and not negative", where=where)
    if row.arrival_s < last_arrival_s:
        raise OutOfOrder("arrival_s", row.arrival_s, f"is before the row ahead of it ({last_arrival_s})", where=where)
    check_tokens("prompt_tokens", row.prompt_tokens, where)
    check_tokens("output_tokens", row.output_tokens, where)


def check_tokens(field: str, value: int | None, where: str) -> None:
    """Raise unless ``value`` is null or a count of at least one token."""
    if value is not None and not 1 <= value <= MOST_TOKENS:
        raise InvalidValue(field, value, "must be a whole number of at least 1", where=where)


def checked(rows: Iterator[TraceRow], name: str) -> Iterator[TraceRow]:
    """``rows`` unchanged; raises at the first that breaks the format. ``name`` is the file named in the error."""
    last_s = 0.0
    for index, row in enumerate(rows):
        check_row(row, f"{name} row {index}", last_s)
        last_s = row.arrival_s
        yield row
