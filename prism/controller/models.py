"""The catalog as the cluster scheduler gets to know it: a model is introduced when it is first needed.

A catalog of hundreds of models costs nothing until they are used: reading a model's files (or downloading them) happens
when its first request waits, off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prism.config.catalog import Catalog, load_catalog
from prism.config.errors import CatalogError
from prism.config.profiles import ProfileStore
from prism.config.reload import CatalogDiff, diff
from prism.controller.images import ModelImages, read_images
from prism.core.errors import InvalidValue, PrismError
from prism.core.events import CatalogChanged
from prism.core.ids import ModelName
from prism.core.specs import ModelSpec
from prism.weights.errors import WeightsError
from prism.weights.folders.fingerprint import fingerprint

log = logging.getLogger(__name__)


class KnownModels:
    """The current catalog and the specs the scheduler knows."""

    def __init__(self, catalog: Catalog, profiles: Path | None = None) -> None:
        """``profiles``: the file that has what models can carry (``prism profile``), looked at when one is read."""
        self.catalog, self._profiles = catalog, profiles
        self._known: dict[ModelName, ModelSpec] = {}
        self._stamp = _stamp(catalog.file)
        self._images: dict[ModelName, ModelImages] = {}
        self._reading: dict[ModelName, asyncio.Task[tuple[ModelSpec, ModelImages]]] = {}

    def known(self, model: ModelName) -> ModelSpec | None:
        """The spec, if the scheduler has it."""
        return self._known.get(model)

    def mark(self, model: ModelName) -> str:
        """The fingerprint of its weights; "" when it is not known."""
        return self.images(model).mark

    @property
    def known_marks(self) -> int:
        """How many models have been looked at: what :meth:`mark` says changes with it, and with the catalog."""
        return len(self._images)

    def images(self, model: ModelName) -> ModelImages:
        """What its engines will look for; nothing for a model that is not known."""
        return self._images.get(model, ModelImages())

    def by_mark(self) -> dict[str, ModelName]:
        """The known models by the fingerprint of their weights; one of them where several have the same."""
        return {images.mark: model for model, images in self._images.items() if images.mark}

    async def introduce(self, model: ModelName) -> CatalogChanged | None:
        """Reads the model's files if that was not done; the event that tells the scheduler, None when it knows it.
        Raises :class:`PrismError` with what is wrong with the model."""
        if model in self._known:
            return None
        task = self._reading.get(model)
        if task is None:
            task = self._reading[model] = asyncio.create_task(
                asyncio.to_thread(_read, self.catalog, model, self._profiles)
            )
        try:
            spec, images = await asyncio.shield(task)
        finally:
            if task.done():
                self._reading.pop(model, None)
        if model in self._known:
            return None
        self._known[model], self._images[model] = spec, images
        return CatalogChanged(upserted=(spec,))

    async def introduce_all(self) -> CatalogChanged:
        """Reads every model of the catalog; those that cannot be read are logged and left out."""
        for config in self.catalog.models:
            try:
                await self.introduce(ModelName(config.name))
            except PrismError as error:
                log.error("%s cannot be read: %s", config.name, error)
        return CatalogChanged(upserted=tuple(self._known.values()))

    def file_changed(self) -> bool:
        """Whether the catalog's file was written since it was last read."""
        return _stamp(self.catalog.file) != self._stamp

    def reload(self) -> tuple[CatalogDiff, CatalogChanged | None]:
        """Reads the file again. Returns what changed and what the scheduler is told. Raises :class:`CatalogError`; the
        old catalog stays."""
        self._stamp = _stamp(self.catalog.file)
        new = load_catalog(self.catalog.file)
        difference = diff(self.catalog, new)
        self.catalog = new
        removed = tuple(ModelName(m.name) for m in difference.removed if ModelName(m.name) in self._known)
        upserted = []
        for name in sorted({change.new.name for change in difference.changed} | difference.bases):
            if name not in self._known or name not in new.by_name:
                continue
            try:
                model = ModelName(name)
                self._known[model], self._images[model] = _read(new, model, self._profiles)
                upserted.append(self._known[model])
            except PrismError as error:
                log.error("changed model cannot be read: %s", error)
        for name in removed:
            del self._known[name]
            self._images.pop(name, None)
        if not removed and not upserted:
            return difference, None
        return difference, CatalogChanged(upserted=tuple(upserted), removed=removed)


def _read(catalog: Catalog, model: ModelName, profiles: Path | None) -> tuple[ModelSpec, ModelImages]:
    """The model's spec and what its engines will look for (nothing where no folder with safetensors is at hand)."""
    spec = _profiled(catalog.spec(model), profiles)
    folder = Path(spec.path)
    try:
        mark = fingerprint(folder) if folder.is_absolute() and any(folder.glob("*.safetensors")) else ""
        return spec, read_images(spec, mark)
    except (WeightsError, OSError) as error:
        log.warning("%s cannot be told to other machines: %s", model, error)
        return spec, ModelImages()


def _profiled(spec: ModelSpec, profiles: Path | None) -> ModelSpec:
    try:
        return spec if profiles is None else ProfileStore(profiles).profiled(spec)
    except (InvalidValue, OSError) as error:
        log.warning("profiles are not used: %s", error)
        return spec


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


__all__ = ["CatalogError", "KnownModels"]
