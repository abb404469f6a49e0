"""A pack whose bytes stay where they are: in the model's own safetensors files.

Copying a model to reorder its tensors costs its size on the disk and, on a disk that reads and writes at one rate,
most of the time of packing. So a folder is packed by default into an *index*: the header with blocks and checksums of
the data area as it would be, and for each tensor the file and offset its bytes are at. The data area is put together
when it is read; blocks are contiguous and ordered from host memory on.

::

    0             8             16                24
    | PRISMIX1    | header size | header checksum | PackIndex (MessagePack) | zeros to 4096

The files are named with their sizes and modification times: an index whose files have changed is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from prism.weights.errors import BadPack, StalePack
from prism.weights.packs.format import PackHeader, check_header, decode_record, encode_record

INDEX_MAGIC: Final = b"PRISMIX1"


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the model's folder as it was when its bytes were checksummed."""

    name: str
    nbytes: int
    changed_ns: int
    """Modification time."""


class PackIndex(msgspec.Struct, frozen=True, kw_only=True):
    """``places[i]`` is where the bytes of ``header.tensors[i]`` begin: number of the file, offset in it."""

    header: PackHeader
    folder: str
    files: tuple[SourceFile, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def paths(self) -> list[Path]:
        return [Path(self.folder) / file.name for file in self.files]


def source_file(path: Path) -> SourceFile:
    stat = path.stat()
    return SourceFile(path.name, stat.st_size, stat.st_mtime_ns)


def encode_index(index: PackIndex) -> bytes:
    return encode_record(INDEX_MAGIC, index)


def decode_index(body: bytes, checksum: int, where: Path | str) -> PackIndex:
    """The index in ``body``, checked for consistency. Raises :class:`BadPack`."""
    index = decode_record(body, checksum, PackIndex, where)
    check_header(index.header, where)
    _check_places(index, where)
    return index


def _check_places(index: PackIndex, where: Path | str) -> None:
    if len(index.places) != len(index.header.tensors):
        raise BadPack(where, f"{len(index.places)} places for {len(index.header.tensors)} tensors")
    for file in index.files:
        if Path(file.name).name != file.name:
            raise BadPack(where, f"refers to {file.name!r}, which is no name of a file")
    for tensor, (file_number, offset) in zip(index.header.tensors, index.places, strict=True):
        if not 0 <= file_number < len(index.files):
            raise BadPack(where, f"tensor {tensor.name!r} is in file {file_number} of {len(index.files)}")
        if offset < 0 or offset + tensor.nbytes > index.files[file_number].nbytes or tensor.strides:
            raise BadPack(where, f"tensor {tensor.name!r} is at {offset}, not inside its file as it should be")


def check_source(index: PackIndex, file: SourceFile, stat: os.stat_result | None, where: Path | str) -> None:
    """Raises :class:`StalePack` unless ``stat`` (None: there is no such file) is that of the file as it was packed."""
    path = Path(index.folder) / file.name
    if stat is None:
        raise StalePack(where, f"{path} is gone", index.folder)
    if (stat.st_size, stat.st_mtime_ns) != (file.nbytes, file.changed_ns):
        raise StalePack(where, f"{path} has changed since", index.folder)
