"""The packs of a machine as its agent reports them: those that are here as a whole."""

from __future__ import annotations

from pathlib import Path

from prism.transfer.errors import TransferError
from prism.weights.errors import WeightsError
from prism.weights.packs.format import PackKey
from prism.weights.store.disk_fill import end_parts, lead_parts
from prism.weights.store.host_copy import open_copy
from prism.weights.store.weight_store import PackInfo, WeightStore
from prism.weights.store.whereabouts import Tier
from prism.wire.reports import PackReport

PackParts = list[tuple[float, float]]
"""Of a pack's data, as fractions (from, to) of it."""


class HeldPacks:
    """Looks ``store`` through; a copy that was complete once is not opened again. For one thread at a time."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._complete: set[tuple[Path, int]] = set()
        """Files and their inodes."""
        self._first: dict[PackKey, tuple[PackParts, PackParts]] = {}
        self.damaged: set[PackKey] = set()
        """Whose copies in memory had a corrupt block, as of the last look."""

    def reports(self) -> list[PackReport]:
        """One per pack, whichever tiers it is on."""
        found: dict[PackKey, PackReport] = {}
        damaged: set[PackKey] = set()
        for info in self._store.ls():
            in_memory = info.tier is Tier.HOST
            if in_memory and not self._is_whole(info, damaged):
                continue
            before = found.get(info.key)
            first, ends = self._first_parts(info.key)
            found[info.key] = PackReport(
                model=info.key.model,
                layout=info.key.layout,
                nbytes=info.nbytes,
                in_memory=in_memory or (before is not None and before.in_memory),
                first=first,
                ends=ends,
            )
        self._first = {key: first for key, first in self._first.items() if key in found}
        self.damaged = damaged
        return list(found.values())

    def _first_parts(self, key: PackKey) -> tuple[PackParts, PackParts]:
        """What an instance needs before it can serve, and of that what only who leads requests does."""
        if key not in self._first:
            try:
                header = self._store.header(key)
            except (WeightsError, OSError):
                return [], []
            if header is None:
                return [], []
            self._first[key] = lead_parts(header), end_parts(header)
        return self._first[key]

    def _is_whole(self, info: PackInfo, damaged: set[PackKey]) -> bool:
        path = info.path
        try:
            mark = (path, path.stat().st_ino)
            if mark not in self._complete:
                copy = open_copy(path)
                if copy is None:
                    return False
                try:
                    if not copy.complete:
                        damaged |= {info.key} if copy.damaged else set()
                        return False
                finally:
                    copy.close()
                self._complete.add(mark)
        except (WeightsError, TransferError, OSError):
            return False
        return True
