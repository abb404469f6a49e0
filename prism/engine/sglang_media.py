"""Images that SGLang's processors prepared, on Prism's wires: a fixed set of types, each coded by name. Nothing is
pickled, and what has no coding here is refused."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import msgspec
import numpy as np
import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)

from prism.core.errors import InvalidValue

_TAG: Final = "~"
_INT64: Final = 1 << 63
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_ENUMS: Final = {"modality": Modality, "format": MultimodalInputFormat}
_ITEM_FIELDS: Final = tuple(field.name for field in dataclasses.fields(MultimodalDataItem))
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(MultimodalProcessorOutput))


def pack_media(media: MultimodalProcessorOutput) -> bytes:
    """The processor's output as bytes. Raises :class:`InvalidValue` for a value of a type that has no coding."""
    if not isinstance(media, MultimodalProcessorOutput):
        raise InvalidValue("messages", type(media).__name__, "is nothing that a processor of images makes")
    values = {name: getattr(media, name) for name in _FIELDS if name != "mm_items"}
    items = [{name: _coded(getattr(item, name)) for name in _ITEM_FIELDS} for item in media.mm_items]
    return msgspec.msgpack.encode([{name: _coded(value) for name, value in values.items()}, items])


def unpack_media(data: bytes) -> MultimodalProcessorOutput:
    """The output in ``data``. Raises :class:`InvalidValue` on anything that :func:`pack_media` does not write."""
    try:
        values, items = msgspec.msgpack.decode(data)
        found = [MultimodalDataItem(**{name: _value(item[name]) for name in _ITEM_FIELDS}) for item in items]
        return MultimodalProcessorOutput(mm_items=found, **{name: _value(values[name]) for name in values})
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InvalidValue("payload", f"{len(data)} bytes", f"no prepared images: {error}") from None


def _coded(value: Any) -> Any:
    match value:
        case None | bool() | float() | str() | bytes():
            return value
        case int():
            return value if -_INT64 <= value < _INT64 else {_TAG: "int", "v": str(value)}
        case list():
            return [_coded(item) for item in value]
        case tuple():
            return {_TAG: "tuple", "v": [_coded(item) for item in value]}
        case dict():
            return {_TAG: "dict", "v": [[_coded(key), _coded(item)] for key, item in value.items()]}
        case torch.Tensor():
            return _array("tensor", str(value.dtype).removeprefix("torch."), value.shape, _bytes(value))
        case np.ndarray():
            return _array("array", value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
        case np.generic():
            return _coded(value.item())
        case Modality():
            return {_TAG: "modality", "v": value.name}
        case MultimodalInputFormat():
            return {_TAG: "format", "v": value.name}
        case _:
            raise InvalidValue("messages", type(value).__name__, "has no coding between front door and engine")


def _array(kind: str, dtype: str, shape: Any, data: bytes) -> dict[str, Any]:
    if dtype not in _DTYPES or (kind == "array" and dtype == "bfloat16"):
        raise InvalidValue("messages", dtype, "is no element type that goes to an engine", tuple(_DTYPES))
    return {_TAG: kind, "d": dtype, "s": list(shape), "v": data}


def _bytes(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _value(coded: Any) -> Any:
    if isinstance(coded, list):
        return [_value(item) for item in coded]
    if not isinstance(coded, dict):
        return coded
    match kind := coded[_TAG]:
        case "int":
            return int(coded["v"])
        case "tuple":
            return tuple(_value(item) for item in coded["v"])
        case "dict":
            return {_value(key): _value(item) for key, item in coded["v"]}
        case "tensor":
            flat = torch.frombuffer(bytearray(coded["v"]), dtype=_DTYPES[coded["d"]]) if coded["v"] else None
            empty = torch.empty(0, dtype=_DTYPES[coded["d"]])
            return (empty if flat is None else flat).reshape(coded["s"])
        case "array":
            return np.frombuffer(coded["v"], dtype=np.dtype(coded["d"])).copy().reshape(coded["s"])
        case _:
            return _ENUMS[kind][coded["v"]]
