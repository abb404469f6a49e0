"""Models that could not be served now, found before anybody asks for them: their files are looked at off the event
loop, at the start and after every change of the catalog, those that are broken again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prism.config.catalog import Catalog
from prism.config.health import Health as Found
from prism.config.health import Hub, examine_model, too_large
from prism.core.specs import DeviceSpec, ModelSpec

log = logging.getLogger(__name__)

AGAIN_S: Final = 30.0
"""A folder that was missing may have been copied meanwhile."""


class CatalogHealth:
    """One controller's look at its catalog. One event loop."""

    def __init__(self) -> None:
        self._broken: dict[str, str] = {}
        self._specs: dict[str, ModelSpec] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The catalog is another one."""
        self._changed.set()

    async def watch(self, catalog: Callable[[], Catalog]) -> None:
        """Keeps :meth:`broken` up to date until cancelled."""
        while True:
            self._changed.clear()
            names = [entry.name for entry in catalog().entries]
            await self._look(catalog(), names)
            while not self._changed.is_set():
                try:
                    async with asyncio.timeout(AGAIN_S):
                        await self._changed.wait()
                except TimeoutError:
                    await self._look(catalog(), list(self._broken))

    async def _look(self, catalog: Catalog, names: list[str]) -> None:
        hub = Hub()
        for name in names:
            try:
                found = await asyncio.to_thread(examine_model, catalog, name, hub)
            except Exception as error:  # files made by others: whatever they break, this goes on with the next model
                log.exception("the files of %s could not be looked at", name)
                found = Found(None, (f"its files could not be looked at: {type(error).__name__}: {error}",))
            if self._changed.is_set():
                return  # of a catalog that is no more
            if found.spec is not None:
                self._specs[name] = found.spec
            why = "; ".join(found.problems)
            if why and why != self._broken.get(name):
                log.warning("%s cannot be served: %s", name, why)
            if why:
                self._broken[name] = why
            else:
                self._broken.pop(name, None)

    def broken(self, devices: Iterable[DeviceSpec], models: Sequence[str]) -> dict[str, str]:
        """Of ``models``: name -> why it cannot be served. ``devices``: all that are up."""
        found = {name: self._broken[name] for name in models if name in self._broken}
        sizes = [device.memory_bytes for device in devices]
        for name in (n for n in models if sizes and n in self._specs and n not in found):
            if (why := too_large(self._specs[name], max(sizes))) is not None:
                found[name] = why
        return found
