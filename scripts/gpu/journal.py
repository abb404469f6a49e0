"""The results of one stage as a JSON file that is whole at every instant."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scripts.gpu.verdicts import Finding


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A finished item as the file has it: the verdict spelled out beside what it follows from."""

    verdict: str
    finding: Finding


class Results(msgspec.Struct, kw_only=True):
    """The file. ``machine`` are facts by name; ``items`` in the order in which they ended."""

    stage: str
    is_dry: bool
    machine: dict[str, str]
    items: dict[str, Recorded] = {}


class Journal:
    """``DIR/STAGE.json``. A file of another kind of run (dry or not) is put aside, not continued."""

    def __init__(self, path: Path, stage: str, machine: dict[str, str], *, dry: bool) -> None:
        self.path = path
        self.results = Results(stage=stage, is_dry=dry, machine=machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = msgspec.json.decode(path.read_bytes(), type=Results)
            if found.is_dry == dry:
                self.results.items = found.items
            else:
                path.replace(path.with_suffix(".dry.json" if found.is_dry else ".gpu.json"))
        self._write()

    def has(self, item: str) -> bool:
        """Whether the item ended by itself or by its limit in this run or one before."""
        return item in self.results.items

    def add(self, finding: Finding) -> None:
        self.results.items[finding.item] = Recorded(verdict=finding.verdict.value, finding=finding)
        self._write()

    def forget(self, items: list[str]) -> None:
        for item in items:
            self.results.items.pop(item, None)
        self._write()

    def _write(self) -> None:
        partial = self.path.with_suffix(".new")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.results), indent=1) + b"\n")
        partial.replace(self.path)
