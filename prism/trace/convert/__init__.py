"""Converters from the public originals to the trace format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prism.core.errors import InvalidValue
from prism.trace.convert.arena import ARENA
from prism.trace.convert.azure import AZURE_2023, AZURE_2024
from prism.trace.convert.base import Converter, ConvertOptions, Tally, from_zero, in_order
from prism.trace.convert.burstgpt import BURSTGPT
from prism.trace.convert.mooncake import MOONCAKE
from prism.trace.convert.sharegpt import SHAREGPT
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

__all__ = ["CONVERTERS", "ConvertOptions", "Converter", "Tally", "convert", "sha256_of"]

CONVERTERS: Final[dict[str, Converter]] = {
    c.name: c for c in (AZURE_2023, AZURE_2024, BURSTGPT, MOONCAKE, SHAREGPT, ARENA)
}


def convert(kind: str, path: Path, options: ConvertOptions) -> tuple[Iterator[TraceRow], TraceInfo, Tally]:
    """``(rows, info, tally)`` of the original ``path`` in format ``kind``. The rows are streamed, in order of arrival,
    from zero; the tally of what was left out fills as they are taken."""
    if kind not in CONVERTERS:
        raise InvalidValue("format", kind, "unknown original format", list(CONVERTERS))
    if not path.is_file():
        raise InvalidValue("source", str(path), "is no file")
    converter, tally = CONVERTERS[kind], Tally()
    provenance = {"source": path.name, "sha256": sha256_of(path), "format": kind, "license": converter.licence}
    rows = from_zero(in_order(converter.rows(path, options, tally)))
    return rows, TraceInfo(provenance, converter.block_tokens), tally


def sha256_of(path: Path) -> str:
    """The SHA-256 of the file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
