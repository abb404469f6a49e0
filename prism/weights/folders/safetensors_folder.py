"""A model folder of safetensors files as byte ranges. No tensor is interpreted, so quantised ones pass untouched.

The headers are read here rather than through the safetensors package because packing copies raw byte ranges, which
that package does not give out.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prism.weights.errors import BadModelFolder
from prism.weights.packs.blocks import TensorPlan
from prism.weights.packs.format import tensor_bytes

_MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""

_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "F4": "float4",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """Where a tensor's bytes are: ``nbytes`` from ``offset`` of ``file`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def plan(self) -> TensorPlan:
        return TensorPlan(self.name, self.dtype, self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, by name: those of the index if there is one, else all.
    Raises :class:`BadModelFolder`."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / str(name) for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadModelFolder(index, f"is no index of safetensors files: {error!r}") from error
        for file in files:
            if file.parent != folder or not file.is_file():
                raise BadModelFolder(index, f"names {file.name!r}, which is not a file of the folder")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModelFolder(folder, "has no *.safetensors file")
    return files


def read_folder(folder: Path) -> list[SourceTensor]:
    """All tensors of the model, in the order of their bytes, file by file. Raises :class:`BadModelFolder`."""
    tensors: list[SourceTensor] = []
    names: set[str] = set()
    for file in weight_files(folder):
        for tensor in read_file(file):
            if tensor.name in names:
                raise BadModelFolder(file, f"has tensor {tensor.name!r}, which another file has too")
            names.add(tensor.name)
            tensors.append(tensor)
    return tensors


def read_file(file: Path) -> list[SourceTensor]:
    """The tensors of one safetensors file by offset. Raises :class:`BadModelFolder` for anything malformed."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise BadModelFolder(file, f"has {len(prefix)} bytes")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise BadModelFolder(file, f"promises a header of {header_bytes} bytes in a file of {size}")
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadModelFolder(file, f"has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadModelFolder(file, "has a header that is no JSON object")
    start = 8 + header_bytes
    found = [_entry(file, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"]
    return sorted(found, key=lambda t: (t.offset, t.name))


def _entry(file: Path, name: str, entry: object, start: int, size: int) -> SourceTensor:
    try:
        assert isinstance(entry, dict)
        dtype = _DTYPES[entry["dtype"]]
        shape = tuple(int(n) for n in entry["shape"])
        first, end = (int(n) for n in entry["data_offsets"])
        nbytes = tensor_bytes(dtype, shape)
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadModelFolder(file, f"has a broken entry for tensor {name!r}: {error!r}") from error
    if min((first, *shape)) < 0 or end - first != nbytes or start + end > size:
        raise BadModelFolder(
            file, f"has tensor {name!r} at {first}..{end}, outside the file or not of its shape's size"
        )
    return SourceTensor(name, dtype, shape, file, start + first, nbytes)
