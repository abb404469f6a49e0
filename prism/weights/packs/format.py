"""The packed format: what a file of the store, a host copy and a peer's answer all contain.

::

    0        8             16                24
    | magic  | header size | header checksum | header (MessagePack) | zeros to 4096 | data area ...

    data area:  | block 0 (embeddings) | block 1 (layer 0) | ... | last block (norm, head) |
                ^ 4096-aligned         ^ 4096-aligned

Tensors lie in their block at multiples of 256 bytes. The data area is checksummed in *leaves* of equal size
(``leaf_bytes``, counted from its start, the last one shorter), so that any range of it can be checked, whatever the
blocks' sizes: a reader verifies while it copies, a multicast cuts the area into equal pieces.
A loaded model is the data area at some address: tensor address = base + block offset + offset in block.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import xxhash

from prism.transfer.windows import LeafCut
from prism.weights.errors import BadPack

MAGIC: Final = b"PRISMPK1"
PREFIX: Final = struct.Struct("<8sQQ")
PAGE_BYTES: Final = 4096
TENSOR_ALIGN_BYTES: Final = 256
LEAF_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 256 << 20
RAW_LAYOUT: Final = "raw"
Record = TypeVar("Record", bound=msgspec.Struct)
"""Tensors exactly as the model folder has them."""

DTYPE_BITS: Final[dict[str, int]] = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "float8_e5m2": 8,
    "float8_e4m3fn": 8,
    "float8_e8m0fnu": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "int16": 16,
    "uint16": 16,
    "float16": 16,
    "bfloat16": 16,
    "int32": 32,
    "uint32": 32,
    "float32": 32,
    "int64": 64,
    "uint64": 64,
    "float64": 64,
    "complex64": 64,
    "float4_e2m1fn_x2": 8,
    "float4": 4,
    "float6_e2m3": 6,
    "float6_e3m2": 6,
}
"""Element types by torch's names (``str(dtype)`` without ``torch.``), and their size in bits."""


class PackKey(msgspec.Struct, frozen=True, order=True):
    """What a pack is: which model's weights, and laid out for whom.

    ``model`` is the fingerprint of the model's files (:mod:`prism.weights.folders.fingerprint`): the same on every
    machine. ``layout`` is ``raw`` or an engine's, such as ``sglang-0.5.16/tp1/rank0/float32``: parameters as they lie
    in that engine once it is ready, so that activation copies blocks and touches no tensor."""

    model: str
    layout: str = RAW_LAYOUT


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. Tied weights are stored once: ``aliases`` are the other names of the same bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block: int
    offset: int
    """In its block, bytes."""
    nbytes: int
    strides: tuple[int, ...] = ()
    """In elements; empty: C-contiguous."""
    aliases: tuple[str, ...] = ()


class BlockEntry(msgspec.Struct, frozen=True, array_like=True):
    """One block: a contiguous range of the data area that becomes usable as a whole."""

    name: str
    offset: int
    """In the data area, bytes, a multiple of 4096."""
    nbytes: int


class PackHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a pack but its bytes. Build one with :func:`prism.weights.packs.blocks.layout_header`."""

    key: PackKey
    label: str
    """For people: the model's name or folder."""
    tensors: tuple[TensorEntry, ...]
    blocks: tuple[BlockEntry, ...]
    data_bytes: int
    leaf_bytes: int = LEAF_BYTES
    leaf_sums: bytes = b""
    """xxh3-64 of each leaf, little-endian, 8 bytes each."""
    meta: bytes = b""
    """The layout's own remarks, opaque here."""

    @property
    def cut(self) -> LeafCut:
        """The data area in leaves."""
        return LeafCut(self.data_bytes, self.leaf_bytes)

    @property
    def leaves(self) -> int:
        return self.cut.leaves

    def leaf_range(self, leaf: int) -> tuple[int, int]:
        """First byte and end of a leaf in the data area."""
        return self.cut.bounds(leaf)

    def leaf_sum(self, leaf: int) -> int:
        return int.from_bytes(self.leaf_sums[8 * leaf : 8 * leaf + 8], "little")

    def block_leaves(self, block: int) -> range:
        """The leaves that hold bytes of ``block``."""
        entry = self.blocks[block]
        return self.cut.holding(entry.offset, entry.offset + entry.nbytes)

    def blocks_in_leaf(self, leaf: int) -> str:
        """Names of the blocks that have bytes in ``leaf``, for messages."""
        start, end = self.leaf_range(leaf)
        return ", ".join(b.name for b in self.blocks if b.offset < end and b.offset + b.nbytes > start)


def align(value: int, step: int) -> int:
    return -(-value // step) * step


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor. Raises ``KeyError`` for an unknown ``dtype``."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def encode_header(header: PackHeader) -> bytes:
    """Prefix, header and padding: everything in front of the data area."""
    return encode_record(MAGIC, header)


def encode_record(magic: bytes, record: msgspec.Struct) -> bytes:
    """``record`` behind a prefix with its size and checksum, padded to whole pages."""
    body = msgspec.msgpack.encode(record)
    raw = PREFIX.pack(magic, len(body), xxhash.xxh3_64_intdigest(body)) + body
    return raw.ljust(align(len(raw), PAGE_BYTES), b"\0")


def decode_prefix(data: bytes, where: Path | str, expected: bytes = MAGIC) -> tuple[int, int]:
    """Size and checksum of the header behind the 24-byte prefix ``data``. Raises :class:`BadPack`."""
    if len(data) < PREFIX.size:
        raise BadPack(where, f"{len(data)} bytes, shorter than the {PREFIX.size}-byte prefix")
    magic, header_bytes, checksum = PREFIX.unpack_from(data)
    if magic != expected:
        raise BadPack(where, f"starts with {magic!r}, expected {expected!r}")
    if header_bytes > MAX_HEADER_BYTES:
        raise BadPack(where, f"header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} allowed")
    return header_bytes, checksum


def decode_header(body: bytes, checksum: int, where: Path | str) -> PackHeader:
    """The header in ``body``, checked for consistency. Raises :class:`BadPack`."""
    header = decode_record(body, checksum, PackHeader, where)
    check_header(header, where)
    return header


def decode_record(body: bytes, checksum: int, kind: type[Record], where: Path | str) -> Record:
    """What :func:`encode_record` put behind the prefix. Raises :class:`BadPack`."""
    found = xxhash.xxh3_64_intdigest(body)
    if found != checksum:
        raise BadPack(where, f"header checksum {found:016x}, expected {checksum:016x}")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadPack(where, f"header does not decode: {error}") from error


def check_header(header: PackHeader, where: Path | str) -> None:
    """Raises :class:`BadPack` unless every offset and size in ``header`` is inside its bounds."""
    if header.data_bytes < 0 or header.leaf_bytes < PAGE_BYTES or header.leaf_bytes % PAGE_BYTES:
        raise BadPack(where, f"data_bytes {header.data_bytes}, leaf_bytes {header.leaf_bytes} (a multiple of 4096)")
    if not header.blocks:
        raise BadPack(where, "no blocks")
    if len(header.leaf_sums) != 8 * header.leaves:
        raise BadPack(where, f"{len(header.leaf_sums)} bytes of checksums for {header.leaves} leaves")
    _check_blocks(header, where)
    _check_tensors(header, where)


def _check_blocks(header: PackHeader, where: Path | str) -> None:
    end = 0
    for block in header.blocks:
        if block.nbytes < 0 or block.offset < end or block.offset % PAGE_BYTES:
            raise BadPack(where, f"block {block.name!r} at {block.offset} overlaps its predecessor or is not aligned")
        end = block.offset + block.nbytes
        if end > header.data_bytes:
            raise BadPack(where, f"block {block.name!r} ends at {end}, the data area at {header.data_bytes}")


def _check_tensors(header: PackHeader, where: Path | str) -> None:
    names: set[str] = set()
    for tensor in header.tensors:
        if tensor.dtype not in DTYPE_BITS:
            raise BadPack(where, f"tensor {tensor.name!r} has the unknown type {tensor.dtype!r}")
        if not 0 <= tensor.block < len(header.blocks) or min(tensor.offset, tensor.nbytes, *tensor.shape, 0) < 0:
            raise BadPack(where, f"tensor {tensor.name!r} is in block {tensor.block} of {len(header.blocks)}")
        if tensor.offset + tensor.nbytes > header.blocks[tensor.block].nbytes:
            raise BadPack(where, f"tensor {tensor.name!r} does not fit into its block")
        if tensor.nbytes != expected_bytes(tensor.dtype, tensor.shape, tensor.strides):
            raise BadPack(where, f"tensor {tensor.name!r} has {tensor.nbytes} bytes, not those of its shape and type")
        for name in (tensor.name, *tensor.aliases):
            if name in names:
                raise BadPack(where, f"two tensors are named {name!r}")
            names.add(name)


def expected_bytes(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Bytes from a tensor's first to its last element; -1 for strides that do not belong to ``shape``."""
    if not strides:
        return tensor_bytes(dtype, shape)
    if len(strides) != len(shape) or min(strides) < 0:
        return -1
    if 0 in shape:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return -(-span * DTYPE_BITS[dtype] // 8)
