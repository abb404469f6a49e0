"""Traces as JSON lines: one object per request, after an optional first line ``{"trace": {...}}`` (provenance)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from prism.core.errors import InvalidValue
from prism.trace.check import check_row
from prism.trace.row import TraceRow
from prism.trace.schema import REQUIRED, TraceInfo, decode_info, encode_info

_HEADER: Final = b'{"trace":'


class _Line(msgspec.Struct, omit_defaults=True):
    arrival_s: float
    model: str
    prompt_tokens: int | None
    output_tokens: int | None
    session: str | None = None
    prefix_hash_ids: list[int] | None = None


class _Header(msgspec.Struct):
    trace: msgspec.Raw


_decoder: Final = msgspec.json.Decoder(_Line)
_encoder: Final = msgspec.json.Encoder()


def read_info(path: Path) -> TraceInfo:
    """The provenance that stands in the file; empty when there is none."""
    with _open(path) as file:
        first = file.readline().strip()
    if not _is_header(first):
        return TraceInfo()
    try:
        return decode_info(msgspec.json.decode(first, type=_Header).trace, str(path))
    except msgspec.DecodeError as exc:
        raise InvalidValue("trace", first[:80], f"the first line is not JSON: {exc}", where=str(path)) from exc


def count_rows(path: Path) -> int:
    """Rows in the file (it is read once)."""
    with _open(path) as file:
        return sum(1 for number, line in enumerate(file) if line.strip() and not (number == 0 and _is_header(line)))


def read_rows(path: Path) -> Iterator[TraceRow]:
    """The rows, checked. Raises :class:`InvalidValue` naming file, row, line and field at the first bad one."""
    last_s, index = 0.0, 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (number == 1 and _is_header(line)):
                continue
            where = f"{path} row {index} (line {number})"
            row = _row(line, where)
            check_row(row, where, last_s)
            last_s, index = row.arrival_s, index + 1
            yield row


def write_rows(path: Path, rows: Iterator[TraceRow], info: TraceInfo) -> int:
    """Write ``rows`` (already checked) to ``path``; returns how many."""
    written = 0
    with path.open("wb") as file:
        file.write(_HEADER + encode_info(info) + b"}\n")
        for row in rows:
            hashes = list(row.prefix_hashes) or None
            line = _Line(row.arrival_s, row.model, row.prompt_tokens, row.output_tokens, row.session, hashes)
            file.write(_encoder.encode(line) + b"\n")
            written += 1
    return written


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as exc:
        raise InvalidValue("file", str(path), f"cannot be read: {exc.strerror}") from exc


def _is_header(line: bytes) -> bool:
    return line.replace(b" ", b"").startswith(_HEADER)


def _row(line: bytes, where: str) -> TraceRow:
    try:
        found = _decoder.decode(line)
    except msgspec.ValidationError as exc:
        field = field_of(str(exc))
        raise InvalidValue(field, _value(line, field), str(exc), where=where) from exc
    except msgspec.DecodeError as exc:
        raise InvalidValue("line", line[:80].decode(errors="replace"), f"is not JSON: {exc}", where=where) from exc
    hashes = tuple(found.prefix_hash_ids or ())
    return TraceRow(found.arrival_s, found.model, found.prompt_tokens, found.output_tokens, found.session, hashes)


def field_of(message: str) -> str:
    """The field that msgspec's message is about."""
    found = re.search(r"at `\$\.(\w+)|field `(\w+)`", message)
    return next((name for name in found.groups() if name), "line") if found else "line"


def _value(line: bytes, field: str) -> object:
    found = msgspec.json.decode(line)
    return found.get(field) if isinstance(found, dict) and field in (*REQUIRED, *found) else found
