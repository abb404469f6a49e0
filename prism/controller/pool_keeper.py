"""The parameter pool's round: every packed model of the catalog has a copy in some machine's memory."""

from __future__ import annotations

import contextlib
import json
import time

from prism.controller.catalog_marks import CatalogMarks
from prism.controller.models import KnownModels
from prism.controller.parameter_pool import FleetPool
from prism.store.interface import Store
from prism.store.values import StoreUnavailable
from prism.wire.mailbox import Outbox


class PoolKeeper:
    """:meth:`look` every second; nothing is done while the catalog has the pool switched off."""

    def __init__(self, models: KnownModels, fleet: FleetPool, store: Store, outbox: Outbox) -> None:
        self._models, self.fleet, self._store, self._outbox = models, fleet, store, outbox
        self.marks = CatalogMarks(models)

    async def look(self) -> None:
        """Orders go out, and the operators' view is written when it changed."""
        if not self._models.catalog.weights.parameter_pool:
            return
        await self.marks.look(self.fleet.packed)
        for mailbox, order in self.fleet.look(self.marks.names(), time.time()):
            self._outbox.send(mailbox, order)
        if not self.fleet.shown:
            with contextlib.suppress(StoreUnavailable):  # written again in a second
                await self._store.put_doc("pool", json.dumps(self.fleet.view()))
                self.fleet.shown = True
