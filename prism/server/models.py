"""The objects that serve a model's requests, made when the first request comes and dropped when others need the
room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from prism.config.catalog import Catalog
from prism.config.errors import ModelFilesError
from prism.config.model_files import announced
from prism.config.sections.model import ModelConfig
from prism.core.ids import ModelName
from prism.core.specs import ModelKind
from prism.server.adapters import AdapterIds
from prism.server.errors import ApiError, unavailable
from prism.server.objectives import Objectives

log = logging.getLogger(__name__)

KEPT_MODELS: Final = 64
FAILURE_KEPT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, ready to take requests."""

    config: ModelConfig
    objectives: Objectives
    context_tokens: int
    kind: ModelKind
    manager: Any
    endpoints: Mapping[str, Any]
    """Route -> :class:`prism.server.sglang_serving.Serving`, for those at which it answers."""
    adapter: str | None = None
    """What its requests carry (:attr:`prism.wire.adapters.AdapterRef.id`); None: the model itself is meant."""


class Builder(Protocol):
    """Makes the objects; runs on a thread, one at a time. Raises :class:`prism.core.errors.PrismError` or what SGLang
    and the tokenizer library raise on files that do not fit."""

    def __call__(self, catalog: Catalog, model: ModelConfig, /) -> ServedModel: ...


class Models:
    """Least recently used models are dropped above ``keep``. One event loop."""

    def __init__(self, catalog: Catalog, build: Builder, keep: int = KEPT_MODELS) -> None:
        self.catalog = catalog
        self._build, self._keep = build, keep
        self._made: OrderedDict[ModelName, ServedModel] = OrderedDict()
        self._making: dict[ModelName, asyncio.Future[ServedModel]] = {}
        self._failed: dict[ModelName, tuple[float, ApiError]] = {}
        self._announced: dict[str, tuple[int, ModelKind]] = {}
        """Context length and kind by name, as the files say."""
        self._adapter_ids = AdapterIds()
        self._one_at_a_time = threading.Lock()

    async def get(self, name: ModelName) -> ServedModel:
        """The model or adapter called ``name`` (of the catalog). Raises :class:`ApiError` (503) when its files cannot
        be used."""
        adapter = self.catalog.adapters_by_name.get(name)
        if adapter is not None:
            lora_id = await self._adapter_ids.of(self.catalog, adapter)
            base = await self.get(ModelName(adapter.base))
            return replace(base, objectives=Objectives.of(adapter), adapter=lora_id)
        made = self._made.get(name)
        if made is not None:
            self._made.move_to_end(name)
            return made
        self._raise_recent(name)
        making = self._making.get(name)
        if making is None:
            making = asyncio.ensure_future(self._make(name))
            self._making[name] = making
            making.add_done_callback(lambda _: self._making.pop(name, None))
        return await asyncio.shield(making)

    def context_tokens(self, name: ModelName) -> int | None:
        """As the engine knows it once the model was used, else as the catalog or (:meth:`learn`) the model's files say;
        None when they cannot be read."""
        name = self.catalog.served_by(name)
        made, config = self._made.get(name), self.catalog.model(name)
        if made is not None:
            return made.context_tokens
        return config.context_tokens or self._announced.get(name, (None,))[0]

    def kind(self, name: ModelName) -> ModelKind | None:
        """As the catalog or (:meth:`learn`) the model's files say; None when they cannot be read."""
        name = self.catalog.served_by(name)
        found = self._announced.get(name)
        return self.catalog.model(name).kind or (None if found is None else found[1])

    async def learn(self, models: Sequence[ModelConfig]) -> None:
        """Reads context lengths and kinds of those of ``models`` that nobody looked at yet, off the loop. A model that
        cannot be read is looked at again by the next call."""
        unknown = [m for m in models if m.name not in self._announced]
        if unknown:
            self._announced |= await asyncio.to_thread(_announced, unknown, self.catalog.base)

    def _raise_recent(self, name: ModelName) -> None:
        at_s, error = self._failed.get(name, (0.0, None))
        if error is not None and time.monotonic() - at_s < FAILURE_KEPT_S:
            raise error

    async def _make(self, name: ModelName) -> ServedModel:
        catalog = self.catalog
        started_s = time.monotonic()
        try:
            served = await asyncio.to_thread(self._locked, catalog, catalog.model(name))
        except Exception as error:
            known = isinstance(error, ModelFilesError | OSError | ValueError)
            log.error("the front objects of a model cannot be made", extra={"model": name}, exc_info=not known)
            failure = unavailable(f"The model {name!r} cannot be served: {error}", None, "model_unavailable")
            self._failed[name] = (time.monotonic(), failure)
            raise failure from error
        log.info("front objects made", extra={"model": name, "seconds": round(time.monotonic() - started_s, 3)})
        if self.catalog is catalog:
            self._keep_it(name, served)
        return served

    def _locked(self, catalog: Catalog, model: ModelConfig) -> ServedModel:
        with self._one_at_a_time:
            return self._build(catalog, model)

    def _keep_it(self, name: ModelName, served: ServedModel) -> None:
        self._failed.pop(name, None)
        self._made[name] = served
        while len(self._made) > self._keep:
            dropped, _ = self._made.popitem(last=False)
            log.info("front objects dropped", extra={"model": dropped})

    def reload(self, catalog: Catalog) -> None:
        """Goes on with ``catalog``. Objects of unchanged models stay; requests that run keep theirs."""
        old = self.catalog
        self.catalog = catalog
        self._failed.clear()
        self._announced.clear()
        self._adapter_ids.clear()
        for name in list(self._made):
            if name not in catalog.by_name or catalog.by_name[name] != old.by_name.get(name):
                del self._made[name]


def _announced(models: Sequence[ModelConfig], base: Path) -> dict[str, tuple[int, ModelKind]]:
    """What the models' ``config.json`` say; nothing is downloaded for it."""
    found = {}
    for model in models:
        with contextlib.suppress(ModelFilesError, OSError):
            found[model.name] = announced(model.path, base, model.revision)
    return found
