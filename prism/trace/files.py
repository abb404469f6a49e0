"""Open and write traces in either format, chosen by the name's ending. Streams: memory does not grow with the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from prism.core.errors import InvalidValue
from prism.trace import jsonl, parquet
from prism.trace.check import checked
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

FORMATS: Final[dict[str, ModuleType]] = {".parquet": parquet, ".jsonl": jsonl}


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace on disk."""

    path: Path
    info: TraceInfo

    def rows(self) -> Iterator[TraceRow]:
        """The rows in order of arrival, read as they are taken; may be called again. Raises :class:`InvalidValue`
        naming file, row and field at the first bad row."""
        rows: Iterator[TraceRow] = _format(self.path).read_rows(self.path)
        return rows

    def count(self) -> int:
        """How many rows there are (a JSONL file is read once for it)."""
        return int(_format(self.path).count_rows(self.path))


def open_trace(path: Path | str) -> Trace:
    """The trace in ``path`` (``.parquet`` or ``.jsonl``). Raises :class:`InvalidValue` when it cannot be read."""
    path = Path(path)
    return Trace(path, _format(path).read_info(path))


def write_trace(path: Path | str, rows: Iterable[TraceRow], info: TraceInfo) -> int:
    """Write ``rows`` to ``path`` and return how many there were. The file appears whole or not at all; a bad row raises
    :class:`InvalidValue` with its number and field."""
    path = Path(path)
    chosen = _format(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        written = int(chosen.write_rows(partial, checked(iter(rows), str(path)), info))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return written


def _format(path: Path) -> ModuleType:
    try:
        return FORMATS[path.suffix]
    except KeyError:
        raise InvalidValue("file", str(path), "unknown trace format by its ending", list(FORMATS)) from None
