"""The record file of a replay: JSON lines, appended as requests end, so that an interrupted replay can go on.

The first line is ``{"plan": {...}, "fingerprint": ...}``, then one :class:`~prism.trace.report.RequestRecord` per line
and ``{"segment": {...}}`` wherever a sender started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from prism.core.errors import InvalidValue
from prism.trace.replay.plan import SendPlan
from prism.trace.report import RequestRecord

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(RequestRecord)
_SEGMENT: Final = b'{"segment":'


class Segment(msgspec.Struct, frozen=True):
    """One run of a sender over (part of) the trace."""

    started_unix_s: float
    first_due_s: float
    """Trace time at which it began."""
    skipped: int
    """Requests that earlier segments had finished."""


class RecordWriter:
    """Appends records. Buffered; :meth:`flush` makes what was added durable against the end of this process."""

    def __init__(self, path: Path, plan: SendPlan) -> None:
        fresh = not path.exists() or path.stat().st_size == 0
        if not fresh:
            _end_last_line(path)
        self._file: IO[bytes] = path.open("ab")
        self._pending: list[bytes] = []
        if fresh:
            self._line({"plan": plan, "fingerprint": plan.fingerprint()})

    def segment(self, segment: Segment) -> None:
        self._line({"segment": segment})

    def add(self, record: RequestRecord) -> None:
        self._pending.append(_encoder.encode(record))

    def flush(self) -> None:
        if self._pending:
            self._file.write(b"\n".join(self._pending) + b"\n")
            self._pending.clear()
            self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(_encoder.encode(value) + b"\n")
        self._file.flush()


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records in ``path``; a line that was cut off by a crash is left out. A request that was sent again after an
    interruption counts once, with its last record."""
    last: dict[int, RequestRecord] = {}
    for line in _lines(path):
        if not line.startswith((_SEGMENT, b'{"plan":')):
            record = _decoder.decode(line)
            last[record.row] = record
    yield from last.values()


def read_segments(path: Path) -> list[Segment]:
    """The segments in ``path``, in order."""
    lines = (line for line in _lines(path) if line.startswith(_SEGMENT))
    return [msgspec.convert(msgspec.json.decode(line)["segment"], Segment) for line in lines]


def finished_rows(path: Path, plan: SendPlan) -> frozenset[int]:
    """Rows that need not be sent again. Raises :class:`InvalidValue` when the file belongs to another plan. Requests
    that failed on this side (interrupted, cancelled) are sent again."""
    with path.open("rb") as file:
        header = msgspec.json.decode(file.readline() or b"{}")
    found = header.get("fingerprint")
    if found != plan.fingerprint():
        raise InvalidValue("resume", str(path), "holds records of another trace or with other settings")
    return frozenset(r.row for r in read_records(path) if r.error not in ("cancelled", "client_limit"))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield line


def _end_last_line(path: Path) -> None:
    """Cut off what a killed writer left of its last line."""
    with path.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
