"""The Chatbot Arena sample that Prism's and VTC's artifacts replay (``real_trace.pkl``): a pickle of request objects.

It is read by :mod:`prism.trace.convert.pickle_values`: no code in it is run and none of its classes are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prism.core.errors import InvalidValue
from prism.trace.check import check_tokens
from prism.trace.convert.base import Converter, ConvertOptions, Tally
from prism.trace.convert.pickle_values import Opaque, read_pickle_values
from prism.trace.row import TraceRow

FIELDS: Final = ("req_time", "adapter_dir", "prompt_len", "output_len")
_MOST: Final = 2**53
_NUMPY_CODES: Final = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "i2": "h", "u8": "Q", "u4": "I", "u2": "H"}


def _rows(path: Path, options: ConvertOptions, tally: Tally) -> Iterator[TraceRow]:
    with path.open("rb") as file:
        root = read_pickle_values(file, str(path))
    requests = list(_requests(root, tally))
    if not requests:
        raise InvalidValue("pickle", type(root).__name__, f"holds no object with {', '.join(FIELDS)}", where=str(path))
    rows = [_row(values, f"{path} row {index}") for index, values in enumerate(requests)]
    yield from sorted(rows, key=lambda row: row.arrival_s)


def _requests(value: Any, tally: Tally) -> Iterator[dict[str, Any]]:
    """The attributes of every request object in lists and tuples of ``value``; other objects are left out."""
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if id(item) in seen:  # a hostile pickle may share or nest its lists without end
            continue
        seen.add(id(item))
        if isinstance(item, list | tuple):
            left.extend(reversed(item))
        elif isinstance(item, Opaque) and all(name in item.attributes() for name in FIELDS):
            yield item.attributes()
        else:
            tally.drop("no request")


def _row(values: dict[str, Any], where: str) -> TraceRow:
    model = values["adapter_dir"] or values.get("model_dir") or ""
    if not isinstance(model, str):
        raise InvalidValue("adapter_dir", model, "must be a string", where=where)
    prompt, output = (_number(values, name, where) for name in ("prompt_len", "output_len"))
    for name, tokens in (("prompt_len", prompt), ("output_len", output)):
        if tokens != int(tokens):
            raise InvalidValue(name, tokens, "must be a whole number", where=where)
        check_tokens(name, int(tokens), where)
    at_s = _number(values, "req_time", where)
    return TraceRow(at_s, model.rstrip("/").rpartition("/")[2], int(prompt), int(output))


def _number(values: dict[str, Any], name: str, where: str) -> float:
    value = _numpy_scalar(values[name])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise InvalidValue(name, value, "must be a number", where=where)
    return value


def _numpy_scalar(value: Any) -> Any:
    """The number in a pickled numpy scalar (a dtype and its bytes); anything else unchanged."""
    if not isinstance(value, Opaque) or not value.name.endswith(".multiarray.scalar") or not value.args:
        return value
    dtype, data = value.args
    code = _NUMPY_CODES.get(dtype.args[0]) if isinstance(dtype, Opaque) and dtype.args else None
    if code is None:
        return value
    raw = _bytes(data)
    order = ">" if isinstance(dtype.state, tuple) and len(dtype.state) > 1 and dtype.state[1] == ">" else "<"
    return struct.unpack(order + code, raw)[0] if len(raw) == struct.calcsize(order + code) else value


def _bytes(data: Any) -> bytes:
    """Bytes as newer pickles have them, or as older ones write them (a call of ``_codecs.encode``, or Latin-1 text)."""
    if isinstance(data, Opaque) and data.name == "_codecs.encode" and data.args:
        data = data.args[0]
    return data.encode("latin-1") if isinstance(data, str) else data if isinstance(data, bytes) else b""


ARENA = Converter("arena", "Chatbot Arena sample, the pickle of Prism's and VTC's artifacts (never executed)", _rows)
