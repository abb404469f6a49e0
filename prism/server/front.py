"""One front-door worker: everything its HTTP handlers share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from prism.config.catalog import Catalog, load_catalog
from prism.config.errors import CatalogError
from prism.core.ids import ModelName
from prism.obs import names
from prism.obs.foreign import show_prompts
from prism.obs.metrics import Metrics, render
from prism.obs.zeros import Zeros
from prism.server.auth import Gate
from prism.server.broker import Broker
from prism.server.errors import MAX_SHOWN_CHARS, ApiError, model_not_found, unavailable
from prism.server.image_fetch import ImageFetcher
from prism.server.models import Builder, Models
from prism.server.placements import Placements
from prism.server.recorder import Recorder
from prism.server.sse import Timing
from prism.server.usage import Usage
from prism.store.interface import Store
from prism.store.values import StoreError
from prism.wire.mailbox import Inbox

log = logging.getLogger(__name__)

RELOAD_S = 1.0


@dataclass(slots=True)
class Front:
    """Made by :func:`make_front`; :meth:`run` while it serves."""

    catalog: Catalog
    store: Store
    broker: Broker
    placements: Placements
    models: Models
    gate: Gate
    metrics: Metrics
    recorder: Recorder
    usage: Usage
    images: ImageFetcher
    decision_log: Path | None = None
    started_s: float = field(default_factory=time.time)
    draining: bool = False
    _generation: int | None = None
    """Of the catalog that is loaded; None: not looked up yet."""
    _catching_up: asyncio.Lock = field(default_factory=asyncio.Lock)
    _zeros: tuple[Catalog, Zeros] | None = None

    @property
    def timing(self) -> Timing:
        server = self.catalog.server
        keepalive_s = float(server.sse_keepalive_s)
        return Timing(first_s=keepalive_s, keepalive_s=keepalive_s, write_s=float(server.write_timeout_s))

    def resolve(self, name: str) -> ModelName:
        """The catalog's name for what a client asked for. Raises :class:`ApiError` (404) with similar names."""
        model = self.catalog.resolve(name)
        if model is None:
            raise model_not_found(name, self.catalog.near(name[:MAX_SHOWN_CHARS]))
        return model

    def check_open(self) -> None:
        """Raises :class:`ApiError` (503) while the server stops."""
        if self.draining:
            self.metrics.inc(names.REFUSED, reason="draining")
            raise unavailable("The server is stopping.", 5.0, "shutting_down")

    def check_backlog(self, model: ModelName) -> None:
        """Raises :class:`ApiError` (429) at the model's own bound on waiting requests (each worker has its share of
        it); those of its adapters count too."""
        model = self.catalog.served_by(model)
        limit = self.catalog.model(model).max_queue
        if limit is None:
            return
        share = -(-limit // self.catalog.server.front_workers)
        if self.broker.waiting.get(model, 0) >= share:
            waiting = self.broker.waiting[model]
            wait_s = self.broker.pace.wait_s(waiting, max(1, share // 20), time.time())
            message = f"{waiting} requests wait for {model!r} already (bound: {share}). Try again in {wait_s:.0f} s."
            raise ApiError(429, "queue_full", message, type="overloaded_error", retry_after_s=wait_s)

    async def run(self, index: int = 0) -> None:
        """The broker, the catalog's follower and the operators' view of worker ``index``, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.broker.run())
            group.create_task(self._follow_catalog())
            group.create_task(self.usage.publish(index))

    async def _follow_catalog(self) -> None:
        while True:
            await self.catch_up()
            await asyncio.sleep(RELOAD_S)

    async def catch_up(self) -> None:
        """Reads the catalog again if another process applied a change."""
        async with self._catching_up:
            try:
                current = await self.store.catalog_generation()
            except StoreError:
                return
            before, self._generation = self._generation, current
            if before not in (None, current):
                await self.reload()

    async def find(self, name: str) -> ModelName:
        """Like :meth:`resolve`; a name that is new since the catalog changed a moment ago is found too."""
        if self.catalog.resolve(name) is None:
            await self.catch_up()
        return self.resolve(name)

    async def reload(self) -> None:
        """Reads the catalog's file again. A file with errors changes nothing (the controller has said what is
        wrong)."""
        try:
            catalog = await asyncio.to_thread(load_catalog, self.catalog.file)
        except (CatalogError, OSError) as error:
            log.error("the catalog was not reloaded: %s", error)
            return
        self.catalog = self.gate.catalog = catalog
        self.models.reload(catalog)
        self.images = ImageFetcher(catalog.server.images)
        show_prompts(catalog.log.prompts)
        log.info("catalog reloaded", extra={"models": len(catalog.models), "adapters": len(catalog.adapters)})

    def metrics_text(self) -> bytes:
        """What ``/metrics`` answers: everything counted, and zeros for what models and keys could count."""
        if self._zeros is None or self._zeros[0] is not self.catalog:
            models, keys = [m.name for m in self.catalog.models], [k.name for k in self.catalog.keys]
            self._zeros = self.catalog, Zeros(models, keys)
        return self._zeros[1].complete(render(self.metrics))

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests and waits for those that run."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.broker.idle()


def make_front(
    catalog: Catalog,
    store: Store,
    inbox: Inbox,
    build: Builder | None = None,
    *,
    metrics: Metrics | None = None,
    admin_key: str = "",
    decision_log: Path | None = None,
) -> Front:
    """``build`` None: SGLang's objects (imported here, which takes seconds unless the process was forked from a warm
    one)."""
    placements = Placements(store)
    broker = Broker(store, inbox, placements, catalog.server.max_queue, catalog.server.front_workers)
    metrics = metrics or Metrics()
    usage = Usage(store, inbox.address, broker.streams)
    broker.on_resumed = lambda model: metrics.inc(names.RESUMED, model=model)
    return Front(
        catalog=catalog,
        store=store,
        broker=broker,
        placements=placements,
        models=Models(catalog, build or _sglang(broker)),
        gate=Gate(catalog, store, admin_key),
        metrics=metrics,
        recorder=Recorder(metrics, usage),
        usage=usage,
        images=ImageFetcher(catalog.server.images),
        decision_log=decision_log,
    )


def _sglang(broker: Broker) -> Builder:
    from prism.server.sglang_build import builder

    return builder(broker)
