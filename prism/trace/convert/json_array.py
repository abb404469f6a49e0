"""The elements of one huge JSON array, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prism.core.errors import InvalidValue

_CHUNK: Final = 1 << 20
_SPACE: Final = " \t\r\n"


def json_array(path: Path) -> Iterator[Any]:
    """The elements of the array in ``path``; memory holds one element and a read-ahead of a MiB. Raises
    :class:`InvalidValue` naming file and element when it is not an array of JSON values."""
    index = 0
    try:
        for value in _elements(path):
            yield value
            index += 1
    except (UnicodeDecodeError, RecursionError) as exc:
        raise InvalidValue("element", None, f"cannot be read: {exc}", where=f"{path} row {index}") from exc


def _elements(path: Path) -> Iterator[Any]:
    decoder, index = json.JSONDecoder(), 0
    with path.open(encoding="utf-8") as file:
        buffer = file.read(_CHUNK).lstrip("\ufeff" + _SPACE)
        if not buffer.startswith("["):
            raise InvalidValue("file", buffer[:20], "is not a JSON array", where=str(path))
        buffer = buffer[1:]
        while True:
            buffer = buffer.lstrip(_SPACE + ("," if index else ""))
            if buffer.startswith("]"):
                return
            try:
                value, end = decoder.raw_decode(buffer)
            except json.JSONDecodeError as exc:
                more = file.read(max(_CHUNK, len(buffer)))
                if not more:
                    raise InvalidValue(
                        "element", buffer[:40], f"is not JSON: {exc.msg}", where=f"{path} row {index}"
                    ) from exc
                buffer += more
                continue
            if end == len(buffer) and (more := file.read(_CHUNK)):
                buffer += more
                continue
            yield value
            buffer, index = buffer[end:], index + 1
