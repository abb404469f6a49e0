"""BurstGPT: ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`` and, in later releases, a session
column. Rows without response tokens are failed requests and are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prism.trace.convert.base import Converter, ConvertOptions, Tally, count, csv_rows, number
from prism.trace.row import TraceRow

COLUMNS: Final = ("Timestamp", "Model", "Request tokens", "Response tokens")
SESSION_COLUMNS: Final = ("Session ID", "SessionID")


def _rows(path: Path, options: ConvertOptions, tally: Tally) -> Iterator[TraceRow]:
    for where, fields in csv_rows(path, COLUMNS):
        prompt, output = count(fields, "Request tokens", where), count(fields, "Response tokens", where)
        if output < 1:
            tally.drop("failed request")
            continue
        if prompt < 1:
            tally.drop("no prompt tokens")
            continue
        session = next((fields[name] for name in SESSION_COLUMNS if fields.get(name)), None)
        yield TraceRow(number(fields, "Timestamp", where), fields["Model"], prompt, output, session)


BURSTGPT = Converter("burstgpt", "BurstGPT CSV (ChatGPT and GPT-4, with or without failures)", _rows)
