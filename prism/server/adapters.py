"""The catalog's LoRA adapters as requests for them carry them to the engines of their bases."""

from __future__ import annotations

import asyncio

from prism.config.adapters import adapter_facts, adapter_mark, misfits
from prism.config.catalog import Catalog
from prism.config.errors import ModelFilesError
from prism.config.sections.model import AdapterConfig
from prism.core.ids import ModelName
from prism.server.errors import unavailable
from prism.wire.adapters import AdapterRef


class AdapterIds:
    """Files are read at the first request of an adapter, and again after a reload of the catalog."""

    def __init__(self) -> None:
        self._known: dict[AdapterConfig, str] = {}

    async def of(self, catalog: Catalog, adapter: AdapterConfig) -> str:
        """Raises :class:`~prism.server.errors.ApiError` (503) when the engines of its base cannot serve it."""
        found = self._known.get(adapter)
        if found is None:
            try:
                found = await asyncio.to_thread(adapter_id, catalog, adapter)
            except ModelFilesError as error:
                message = f"The model {adapter.name!r} cannot be served: {error}"
                raise unavailable(message, None, "model_unavailable") from error
            self._known[adapter] = found
        return found

    def clear(self) -> None:
        """The catalog was read again: files may have been replaced."""
        self._known.clear()


def adapter_id(catalog: Catalog, adapter: AdapterConfig) -> str:
    """What requests of ``adapter`` carry. Raises :class:`ModelFilesError` with why no engine could serve it."""
    facts = adapter_facts(adapter.adapter, catalog.base, adapter.revision)
    spec = catalog.spec(adapter.base)
    for why in misfits(facts, spec.lora, spec.shape):
        raise ModelFilesError(f"adapter {facts.folder} {why}")
    return AdapterRef(ModelName(adapter.name), str(facts.folder), adapter_mark(facts.folder)).id
