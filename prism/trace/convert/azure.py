"""The Azure LLM inference traces: 2023 (``AzureLLMInferenceTrace_{code,conv}.csv``) and 2024 (one week, same columns,
timestamps with a zone)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prism.core.errors import InvalidValue
from prism.trace.convert.base import Converter, ConvertOptions, Tally, count, csv_rows
from prism.trace.row import TraceRow

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _rows(path: Path, options: ConvertOptions, tally: Tally) -> Iterator[TraceRow]:
    first: datetime | None = None
    for where, fields in csv_rows(path, COLUMNS):
        at = _time(fields["TIMESTAMP"], where)
        first = at if first is None else first
        prompt, output = count(fields, "ContextTokens", where), count(fields, "GeneratedTokens", where)
        if prompt < 1 or output < 1:
            tally.drop("no tokens")
            continue
        yield TraceRow((at - first).total_seconds(), options.model, prompt, output)


def _time(text: str | None, where: str) -> datetime:
    try:
        at = datetime.fromisoformat((text or "").strip())
    except ValueError:
        raise InvalidValue("TIMESTAMP", text, "must be YYYY-MM-DD HH:MM:SS[.fraction][zone]", where=where) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


AZURE_2023 = Converter(
    "azure2023", "Azure LLM inference trace 2023, CSV (code or conversation)", _rows, licence="CC-BY-4.0"
)
AZURE_2024 = Converter(
    "azure2024", "Azure LLM inference trace 2024, CSV (a week, code or conversation)", _rows, licence="CC-BY-4.0"
)
