"""Which tensor goes into which block, in the order in which a forward pass needs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prism.remote.pieces import reads_images
from prism.weights.packs.format import (
    LEAF_BYTES,
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    BlockEntry,
    PackHeader,
    PackKey,
    TensorEntry,
    align,
    expected_bytes,
)

MIN_LEAF_BYTES: Final = 64 << 10
LEAVES_WANTED: Final = 64
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_FIRST: Final = ("embed", "wte", "wpe", "word_embeddings", "rotary", "cos_sin")
HEAD: Final = "head"
LAYER: Final = "layer"
"""Blocks of layers are called so, with the layer's number behind."""
EMBEDDINGS: Final = "embeddings"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to be packed: ``dtype`` by torch's name, ``shape`` and ``strides`` in elements (empty: contiguous).
    ``aliases`` are other names of the same bytes (tied weights)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return expected_bytes(self.dtype, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A block to be packed: its tensors lie in it in this order."""

    name: str
    tensors: tuple[TensorPlan, ...] = field(default=())


def stage_of(name: str) -> tuple[int, str]:
    """When a forward pass first needs the tensor: (0, embeddings and what reads images), (1 + i, layer i) or (a large
    number, head)."""
    if reads_images(name):
        return 0, EMBEDDINGS
    if match := _LAYER.search(name):
        layer = int(match[1])
        return 1 + layer, f"{LAYER}{layer}"
    if any(word in name for word in _FIRST):
        return 0, EMBEDDINGS
    return 1 << 30, HEAD


def plan_blocks(tensors: Iterable[TensorPlan], block_bytes: int | None = None) -> tuple[BlockPlan, ...]:
    """Embeddings, each layer, head; every tensor in exactly one block, in the given order within it.

    With ``block_bytes`` a larger block is cut between tensors into parts of at most that size (a tensor that is larger
    by itself stays whole). A head tied to the embeddings is an alias there and needs no block of its own.
    """
    stages: dict[tuple[int, str], list[TensorPlan]] = {}
    for tensor in tensors:
        stages.setdefault(stage_of(tensor.name), []).append(tensor)
    blocks: list[BlockPlan] = []
    for (_, name), members in sorted(stages.items()):
        parts = _cut(members, block_bytes) if block_bytes else [members]
        for i, part in enumerate(parts):
            blocks.append(BlockPlan(name if len(parts) == 1 else f"{name}.{i}", tuple(part)))
    return tuple(blocks)


def _cut(members: Sequence[TensorPlan], block_bytes: int) -> list[list[TensorPlan]]:
    parts: list[list[TensorPlan]] = []
    room = 0
    for tensor in members:
        size = align(tensor.nbytes, TENSOR_ALIGN_BYTES)
        if not parts or size > room:
            parts.append([])
            room = block_bytes
        parts[-1].append(tensor)
        room -= size
    return parts


def layout_header(
    key: PackKey, blocks: Sequence[BlockPlan], label: str = "", meta: bytes = b"", leaf_bytes: int | None = None
) -> PackHeader:
    """The header of a pack with these blocks, its checksums still zero. Offsets follow from the order alone. Without
    ``leaf_bytes`` small packs get small leaves, so that they too can be cut into many pieces."""
    entries: list[BlockEntry] = []
    tensors: list[TensorEntry] = []
    end = 0
    for index, block in enumerate(blocks):
        size = 0
        for t in block.tensors:
            tensors.append(TensorEntry(t.name, t.dtype, t.shape, index, size, t.nbytes, t.strides, t.aliases))
            size = align(size + t.nbytes, TENSOR_ALIGN_BYTES)
        entries.append(BlockEntry(block.name, end, size))
        end = align(end + size, PAGE_BYTES)
    if leaf_bytes is None:
        leaf_bytes = min(LEAF_BYTES, max(MIN_LEAF_BYTES, 1 << (end // LEAVES_WANTED).bit_length()))
    return PackHeader(
        key=key,
        label=label,
        tensors=tuple(tensors),
        blocks=tuple(entries),
        data_bytes=end,
        leaf_bytes=leaf_bytes,
        leaf_sums=bytes(8 * -(-end // leaf_bytes)),
        meta=meta,
    )
