"""Checking a pack on disk against its own checksums."""

from __future__ import annotations

from pathlib import Path

from prism.weights.errors import CorruptBlock
from prism.weights.packs.disk_pack import open_pack


def verify_file(path: Path) -> list[CorruptBlock]:
    """One :class:`CorruptBlock` per corrupt leaf of the pack at ``path``. Raises :class:`BadPack` when it cannot be
    read as a pack at all, :class:`~prism.weights.errors.StalePack` when the model's files it refers to have changed."""
    found: list[CorruptBlock] = []
    with open_pack(path) as pack:
        header = pack.header
        for run in pack.runs(range(header.leaves)):
            for leaf, checksum in zip(run, pack.leaf_sums(run), strict=True):
                if checksum != header.leaf_sum(leaf):
                    name = header.blocks_in_leaf(leaf)
                    found.append(CorruptBlock(path, name, leaf, header.leaf_sum(leaf), checksum))
    return found
