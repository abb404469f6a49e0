"""Where a request stands that has no token yet, for a client that asked to be told."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from prism.core.ids import ModelName
from prism.core.views import InstanceState
from prism.server.placements import Placements
from prism.server.stream import Progress, RequestStream
from prism.store.interface import Queues
from prism.store.values import StoreError
from prism.wire import keys

LOOK_S: Final = 0.5


async def progress_of(request_id: str, model: ModelName, store: Queues, placements: Placements) -> Progress | None:
    """None when no queue has the request (any more). Raises :class:`StoreError`."""
    [queue] = await store.where([request_id])
    if queue is None:
        return None
    position = await store.position(request_id)
    if queue != keys.INACTIVE_QUEUE:
        return Progress("queued", position)
    for replica in placements.replicas(model):
        if replica.state is InstanceState.LOADING:
            return Progress("loading", position, f"on {', '.join(replica.devices)}: {replica.reason}")
    return Progress("waiting_for_model", position)


async def look(stream: RequestStream, store: Queues, placements: Placements) -> None:
    """Brings ``stream.progress`` up to date, if the store answers."""
    with contextlib.suppress(StoreError):
        stream.progress = await progress_of(stream.id, stream.model, store, placements) or stream.progress


async def follow(stream: RequestStream, store: Queues, placements: Placements) -> None:
    """Keeps ``stream.progress`` current until its first token or its end."""
    while stream.first_token_s is None and not stream.ended and not stream.released:
        await asyncio.sleep(LOOK_S)
        await look(stream, store, placements)
