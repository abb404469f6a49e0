"""Fingerprints of the catalog's models, also of those that nobody has asked for yet.

Packs are called by fingerprint. Those of models that are in use are known; the folders of others are looked at when
there are packs about that nobody can name, a few at a time and off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from prism.config.catalog import Catalog
from prism.config.errors import ModelFilesError
from prism.config.model_files import local_folder
from prism.controller.models import KnownModels
from prism.core.ids import ModelName
from prism.weights.errors import WeightsError
from prism.weights.folders.fingerprint import fingerprint

log = logging.getLogger(__name__)

LOOK_S: Final = 0.2
"""Of every second."""


class CatalogMarks:
    """:meth:`look` every second."""

    def __init__(self, models: KnownModels) -> None:
        self._models = models
        self._found: dict[tuple[str, str], str] = {}
        """By name and path; "": it has none."""
        self._names: tuple[tuple[Catalog, int, int], dict[str, str]] | None = None

    def names(self) -> Mapping[str, str]:
        """Fingerprint -> the catalog's name, as far as they are known."""
        stamp = (self._models.catalog, self._models.known_marks, len(self._found))
        if self._names is not None and self._names[0][0] is stamp[0] and self._names[0][1:] == stamp[1:]:
            return self._names[1]
        found: dict[str, str] = {}
        for config in self._models.catalog.models:
            mark = self._models.mark(ModelName(config.name)) or self._found.get((config.name, config.path), "")
            if mark:
                found[mark] = config.name
        self._names = (stamp, found)
        return found

    async def look(self, packed: Collection[str]) -> None:
        """``packed``: fingerprints of all packs that machines report."""
        if packed - self.names().keys():
            await asyncio.to_thread(self._read, self._models.catalog)

    def _read(self, catalog: Catalog) -> None:
        end_s = time.monotonic() + LOOK_S
        for config in catalog.models:
            key = (config.name, config.path)
            if key not in self._found and not self._models.mark(ModelName(config.name)):
                self._found[key] = _mark(config.path, catalog.base)
                if time.monotonic() > end_s:
                    return


def _mark(path: str, base: Path) -> str:
    try:
        folder = local_folder(path, base)
        return fingerprint(folder) if folder is not None and any(folder.glob("*.safetensors")) else ""
    except (ModelFilesError, WeightsError, OSError) as error:
        log.warning("%s has no fingerprint: %s", path, error)
        return ""
