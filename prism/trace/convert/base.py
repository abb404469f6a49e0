"""What a converter is: a public original in, checked rows of our format out, streamed."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prism.core.errors import InvalidValue
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

REORDER_ROWS: Final = 65_536
"""How far out of order (in rows) a source may be; repaired within this many rows, in constant memory."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What a source cannot say itself. ``model`` names the model of sources that have one unnamed model. The others are
    for sources of texts without arrival times (ShareGPT)."""

    model: str = ""
    tokenizer: Path | None = None
    chars_per_token: float | None = None
    """Used instead of a tokenizer to count tokens of texts."""
    rate_rps: float | None = None
    """Conversations started per second."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between conversation starts (1: Poisson)."""
    think_s: float = 15.0
    """Mean time a user takes to read an answer and to go on (exponential)."""
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """Rows of the source that were left out, by reason. Filled while the rows are taken."""

    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Converter:
    """One original format. ``rows`` streams the rows, in order or nearly so."""

    name: str
    about: str
    rows: Callable[[Path, ConvertOptions, Tally], Iterator[TraceRow]]
    block_tokens: int = TraceInfo().block_tokens
    licence: str = ""


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """``(where, fields)`` for each row of a CSV file with a header; ``where`` names file, row and line for errors.
    Raises :class:`InvalidValue` for a missing column, and for a line that is no CSV or no UTF-8."""
    index = 0
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            for column in columns:
                if column not in names:
                    raise InvalidValue(column, names, "the column is missing", columns, where=str(path))
            for fields in reader:
                yield f"{path} row {index} (line {reader.line_num})", fields
                index += 1
        except (csv.Error, UnicodeDecodeError) as exc:
            where = f"{path} row {index} (after line {reader.line_num})"
            raise InvalidValue("line", None, f"cannot be read: {exc}", where=where) from exc


def count(fields: dict[str, str], name: str, where: str) -> int:
    """The whole number of at least 0 in column ``name`` (``12.0`` is one)."""
    value = number(fields, name, where)
    if value < 0 or value != int(value):
        raise InvalidValue(name, fields[name], "must be a whole number of at least 0", where=where)
    return int(value)


def number(fields: dict[str, str], name: str, where: str) -> float:
    """The finite number in column ``name``."""
    try:
        value = float(fields[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise InvalidValue(name, fields[name], "must be a number", where=where)
    return value


def in_order(rows: Iterable[TraceRow], window: int = REORDER_ROWS) -> Iterator[TraceRow]:
    """``rows`` sorted by arrival as far as a buffer of ``window`` rows reaches. What is further out of order stays so
    and is refused by the writer, with its row."""
    heap: list[tuple[float, int, TraceRow]] = []
    for index, row in enumerate(rows):
        entry = (row.arrival_s, index, row)
        if len(heap) < window:
            heapq.heappush(heap, entry)
        else:
            yield heapq.heappushpop(heap, entry)[2]
    while heap:
        yield heapq.heappop(heap)[2]


def from_zero(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """``rows`` with times counted from the first of them."""
    start_s: float | None = None
    for row in rows:
        start_s = row.arrival_s if start_s is None else start_s
        arrival_s = round(row.arrival_s - start_s, 7)
        yield TraceRow(arrival_s, row.model, row.prompt_tokens, row.output_tokens, row.session, row.prefix_hashes)
