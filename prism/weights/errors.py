"""What can go wrong with stored weights. Messages name the file or node, the value found and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism.core.errors import PrismError


class WeightsError(PrismError):
    """Base of all errors about packed weights. What goes wrong between machines is a
    :class:`~prism.transfer.errors.TransferError`."""


class BadPack(WeightsError):
    """A packed file (or the header a peer sent) is not one this version can use: truncated, foreign, inconsistent."""

    def __init__(self, where: Path | str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"{where}: not a usable weight pack: {why}")


class StalePack(BadPack):
    """A pack that refers to the model's own files, one of which has changed or gone since: pack the folder again."""

    def __init__(self, where: Path | str, why: str, folder: str) -> None:
        self.folder = folder
        super().__init__(where, f"its bytes are in the model's files, and {why}; run `prism pack {folder}` again")


class BadModelFolder(WeightsError):
    """A model folder cannot be packed: no safetensors, a broken header, an index that names a missing file."""

    def __init__(self, where: Path | str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"{where}: cannot be packed: {why}")


class CorruptBlock(WeightsError):
    """The bytes of a block do not have the checksum its header promises. Nothing of that block was handed out.
    ``why``: what there is instead of it, and what to do."""

    def __init__(self, where: Path | str, block: str, leaf: int, expected: int, found: int, why: str = "") -> None:
        self.where, self.block, self.leaf, self.expected, self.found = where, block, leaf, expected, found
        wrong = f"leaf {leaf} has checksum {found:016x}, expected {expected:016x}"
        super().__init__(f"{where}: block {block!r} is corrupt: {f'{why}: ' if why else ''}{wrong}")

    def because(self, why: str) -> CorruptBlock:
        """The same, with a reason."""
        return CorruptBlock(self.where, self.block, self.leaf, self.expected, self.found, why)


class StoreFull(WeightsError):
    """A pack does not fit into the budget although everything that may go has gone."""

    def __init__(self, where: Path, needed_bytes: int, budget_bytes: int, in_use_bytes: int) -> None:
        self.where, self.needed_bytes, self.budget_bytes, self.in_use_bytes = (
            where,
            needed_bytes,
            budget_bytes,
            in_use_bytes,
        )
        super().__init__(
            f"{where}: {needed_bytes} bytes do not fit into the budget of {budget_bytes} bytes: "
            f"{in_use_bytes} bytes belong to packs in use"
        )


class IncompletePack(WeightsError):
    """A writer was finished before every tensor had its bytes."""

    def __init__(self, where: Path, missing: Sequence[str]) -> None:
        self.where, self.missing = where, tuple(missing)
        shown = ", ".join(self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
        super().__init__(f"{where}: {len(self.missing)} tensors were never written: {shown}")


class LoadCancelled(WeightsError):
    """A load stopped because its cancel event was set; ``blocks_done`` blocks are complete in the destination."""

    def __init__(self, blocks_done: int, blocks: int) -> None:
        self.blocks_done, self.blocks = blocks_done, blocks
        super().__init__(f"load cancelled after {blocks_done} of {blocks} blocks")
