"""The simulator's modules as C extensions, which ``make compiled`` makes of the same sources: more than twice as fast,
with the same decisions.

Nothing uses them unasked: a process whose environment has ``PRISM_COMPILED=build/compiled`` (and those it starts) takes
them from there. They are never older than the sources: other sources are an error that says what to do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

VARIABLE: Final = "PRISM_COMPILED"
STAMP: Final = "sources.json"
"""In the folder: of each module the digest of the source that it was compiled from."""


class CompiledModules(MetaPathFinder):
    """Finds modules by their names among ``files``."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks."""
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def digest(source: Path) -> str:
    """What tells one source from another."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def use_compiled(folder: Path, sources: Path) -> None:
    """From now on modules come from ``folder`` (what ``make compiled`` wrote), if they were compiled of what lies under
    ``sources`` (the folder that has ``prism/``). Raises :class:`ImportError` otherwise, or if one of them was imported
    already."""
    stamp = folder / STAMP
    if not stamp.is_file():
        raise ImportError(f"{VARIABLE}={folder}: there is no {STAMP} in it; run `make compiled`, or unset {VARIABLE}")
    digests: dict[str, str] = json.loads(stamp.read_text())
    files, changed = dict[str, Path](), list[str]()
    for name, of_source in digests.items():
        source = sources.joinpath(*name.split(".")).with_suffix(".py")
        found = next(iter(folder.joinpath(*name.split(".")[:-1]).glob(f"{name.rpartition('.')[2]}.*")), None)
        if found is None or not source.is_file() or digest(source) != of_source:
            changed.append(name)
        else:
            files[name] = found
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ImportError(
            f"{VARIABLE}={folder} is of other sources ({shown}); run `make compiled`, or unset {VARIABLE}"
        )
    if early := sorted(files.keys() & sys.modules.keys()):
        raise ImportError(f"{VARIABLE} comes too late: {early[0]} was imported already")
    sys.path.append(str(folder))  # what the modules have in common lies in it
    sys.meta_path.insert(0, CompiledModules(files))
