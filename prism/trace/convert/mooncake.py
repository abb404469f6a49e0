"""The Mooncake FAST'25 traces: JSON lines with ``timestamp`` (ms), lengths, and hash ids of 512-token prompt blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from prism.core.errors import InvalidValue
from prism.trace.convert.base import Converter, ConvertOptions, Tally
from prism.trace.jsonl import field_of
from prism.trace.row import TraceRow

BLOCK_TOKENS: Final = 512


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_decoder: Final = msgspec.json.Decoder(_MooncakeLine)


def _rows(path: Path, options: ConvertOptions, tally: Tally) -> Iterator[TraceRow]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            found = _line(line, f"{path} row {index} (line {number})")
            index += 1
            if found.input_length < 1 or found.output_length < 1:
                tally.drop("no tokens")
                continue
            at_s, hashes = found.timestamp / 1000, tuple(found.hash_ids)
            yield TraceRow(at_s, options.model, found.input_length, found.output_length, None, hashes)


def _line(line: bytes, where: str) -> _MooncakeLine:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as exc:
        raise InvalidValue(field_of(str(exc)), line[:80].decode(errors="replace"), str(exc), where=where) from exc


MOONCAKE = Converter("mooncake", "Mooncake FAST'25 JSONL, with prefix hashes", _rows, BLOCK_TOKENS, "Apache-2.0")
