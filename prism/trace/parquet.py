"""Traces as parquet: read and written batch by batch, so that memory does not grow with the trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prism.core.errors import InvalidValue
from prism.trace.check import OutOfOrder
from prism.trace.row import TraceRow
from prism.trace.schema import (
    ARROW_SCHEMA,
    METADATA_KEY,
    MOST_TOKENS,
    OPTIONAL,
    REQUIRED,
    TraceInfo,
    decode_info,
    encode_info,
)

READ_ROWS: Final = 16_384
GROUP_ROWS: Final = 65_536
"""Rows per row group: what a reader holds at least."""


def read_info(path: Path) -> TraceInfo:
    """The provenance that stands in the file; empty when there is none."""
    with _open(path) as file:
        metadata = file.schema_arrow.metadata or {}
    return decode_info(metadata[METADATA_KEY], str(path)) if METADATA_KEY in metadata else TraceInfo()


def count_rows(path: Path) -> int:
    """Rows in the file, from its footer."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def read_rows(path: Path) -> Iterator[TraceRow]:
    """The rows, checked. Raises :class:`InvalidValue` naming file, row and field at the first bad one."""
    with _open(path) as file:
        columns = _columns(file, path)
        first, last_s = 0, 0.0
        batches = file.iter_batches(batch_size=READ_ROWS, columns=columns)
        while (raw := _next(batches, path, first)) is not None:
            batch = _cast(raw, path, first)
            last_s = _check(batch, path, first, last_s)
            yield from _rows(batch)
            first += batch.num_rows


def write_rows(path: Path, rows: Iterator[TraceRow], info: TraceInfo) -> int:
    """Write ``rows`` (already checked) to ``path``; returns how many."""
    schema = ARROW_SCHEMA.with_metadata({METADATA_KEY: encode_info(info)})
    written = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(islice(rows, GROUP_ROWS)):
            writer.write_batch(_batch(chunk, schema))
            written += len(chunk)
    return written


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowInvalid, OSError) as exc:
        raise InvalidValue("file", str(path), f"cannot be read as parquet: {exc}") from exc


def _next(batches: Iterator[Any], path: Path, first: int) -> Any:
    """The next batch, whose first row is ``first``; None at the end."""
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as exc:
        raise InvalidValue("file", str(path), f"is damaged: {exc}", where=f"{path} from row {first} on") from exc


def _columns(file: Any, path: Path) -> list[str]:
    present = file.schema_arrow.names
    for name in REQUIRED:
        if name not in present:
            raise InvalidValue(name, present, "the column is missing", REQUIRED, where=str(path))
    return [*REQUIRED, *(name for name in OPTIONAL if name in present)]


def _cast(batch: Any, path: Path, first: int) -> Any:
    """``batch`` with the types of the format. A value that does not fit is found again to be named."""
    arrays = []
    for name in batch.schema.names:
        wanted = ARROW_SCHEMA.field(name).type
        column = batch.column(name)
        try:
            arrays.append(column.cast(wanted))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            row, value = _first_uncastable(column, wanted)
            raise InvalidValue(name, value, f"is not {wanted}", where=f"{path} row {first + row}") from exc
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _first_uncastable(column: Any, wanted: Any) -> tuple[int, object]:
    for index in range(len(column)):
        try:
            column.slice(index, 1).cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return index, column[index].as_py()
    return 0, None


def _check(batch: Any, path: Path, first: int, last_s: float) -> float:
    """Raise for the first bad row of the batch; returns its last arrival time."""
    for name in ("arrival_s", "model"):
        if batch.column(name).null_count:
            _fail(batch, path, first, name, pc.is_null(batch.column(name)), "must not be null")
    arrivals = np.asarray(batch.column("arrival_s"))
    if not len(arrivals):
        return last_s
    good = np.isfinite(arrivals) & (arrivals >= 0)
    if not good.all():
        _fail(batch, path, first, "arrival_s", pa.array(~good), "must be finite and not negative")
    steps = np.diff(arrivals, prepend=last_s)
    if (steps < 0).any():
        row = int(np.argmax(steps < 0))
        where = f"{path} row {first + row}"
        raise OutOfOrder("arrival_s", float(arrivals[row]), "is before the row ahead of it", where=where)
    for name in ("prompt_tokens", "output_tokens"):
        column = batch.column(name)
        bad = pc.fill_null(pc.or_(pc.less(column, 1), pc.greater(column, MOST_TOKENS)), False)
        if pc.any(bad).as_py():
            _fail(batch, path, first, name, bad, "must be a whole number of at least 1")
    return float(arrivals[-1])


def _fail(batch: Any, path: Path, first: int, name: str, bad: Any, why: str) -> None:
    row = int(np.argmax(np.asarray(bad)))
    raise InvalidValue(name, batch.column(name)[row].as_py(), why, where=f"{path} row {first + row}")


def _rows(batch: Any) -> Iterator[TraceRow]:
    data = batch.to_pydict()
    empty: list[None] = [None] * batch.num_rows
    hashes = data.get("prefix_hash_ids", empty)
    required = (data[name] for name in REQUIRED)
    for a, m, p, o, s, h in zip(*required, data.get("session", empty), hashes, strict=True):
        yield TraceRow(a, m, p, o, s, tuple(h) if h else ())


def _batch(rows: list[TraceRow], schema: Any) -> Any:
    columns = {
        "arrival_s": [r.arrival_s for r in rows],
        "model": [r.model for r in rows],
        "prompt_tokens": [r.prompt_tokens for r in rows],
        "output_tokens": [r.output_tokens for r in rows],
        "session": [r.session for r in rows],
        "prefix_hash_ids": [list(r.prefix_hashes) or None for r in rows],
    }
    return pa.RecordBatch.from_pydict(columns, schema=schema)
