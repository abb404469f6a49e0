"""Names and headers of the store's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from prism.weights.errors import BadPack
from prism.weights.packs.format import PAGE_BYTES, PREFIX, PackHeader, PackKey, align, decode_header, decode_prefix

SUFFIX: Final = ".pack"


def pack_name(key: PackKey) -> str:
    """Path of a pack relative to a store's folder: ``FINGERPRINT/LAYOUT.pack``, the layout percent-encoded."""
    return f"{quote(key.model, safe='')}/{quote(key.layout, safe='')}{SUFFIX}"


def key_of(path: Path) -> PackKey:
    """The key whose :func:`pack_name` is at the end of ``path``."""
    return PackKey(unquote(path.parent.name), unquote(path.name.removesuffix(SUFFIX)))


def data_offset(header_bytes: int) -> int:
    """Where the data area begins in a file whose header has ``header_bytes`` bytes."""
    return align(PREFIX.size + header_bytes, PAGE_BYTES)


def read_header(fd: int, where: Path | str) -> tuple[PackHeader, int]:
    """Header and data offset of the pack open at ``fd``. Raises :class:`BadPack`, also for a file that is too short."""
    header_bytes, checksum = decode_prefix(os.pread(fd, PREFIX.size, 0), where)
    body = os.pread(fd, header_bytes, PREFIX.size)
    if len(body) != header_bytes:
        raise BadPack(where, f"ends inside its header ({len(body)} of {header_bytes} bytes)")
    header = decode_header(body, checksum, where)
    start = data_offset(header_bytes)
    size = os.fstat(fd).st_size
    if size < start + header.data_bytes:
        raise BadPack(where, f"has {size} bytes, its header promises {start + header.data_bytes}")
    return header, start
