"""What this worker knows of its models' use, published for operators' views."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from prism.server.stream import RequestStream
from prism.store.interface import Store
from prism.store.values import StoreError

PUBLISH_S: Final = 1.0
SHOWN_REQUESTS: Final = 500


class ModelUse(msgspec.Struct, kw_only=True):
    """Counts since the worker started; Unix seconds."""

    last_used_s: float = 0.0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0

    def add(self, other: ModelUse) -> None:
        """Merges what another worker counted."""
        self.last_used_s = max(self.last_used_s, other.last_used_s)
        self.ttft_met += other.ttft_met
        self.ttft_missed += other.ttft_missed
        self.tpot_met += other.tpot_met
        self.tpot_missed += other.tpot_missed


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended."""

    id: str
    model: str
    state: str
    device: str
    waited_s: float
    tokens: int


class WorkerUse(msgspec.Struct, kw_only=True):
    """The document of one worker: ``front:INDEX``."""

    at_s: float
    mailbox: str
    models: dict[str, ModelUse]
    requests: list[OpenRequest]


def document_name(index: int) -> str:
    return f"front:{index}"


class Usage:
    """Counts, and publishes once a second while anything changes."""

    def __init__(self, store: Store, mailbox: str, streams: Mapping[str, RequestStream]) -> None:
        self._store, self._mailbox, self._streams = store, mailbox, streams
        self._models: dict[str, ModelUse] = {}
        self._changed = True

    def of(self, model: str) -> ModelUse:
        """The counts of ``model``, to be changed by the caller."""
        self._changed = True
        return self._models.setdefault(model, ModelUse())

    def document(self, now_s: float) -> WorkerUse:
        oldest = sorted(self._streams.values(), key=lambda stream: stream.arrival_s)[:SHOWN_REQUESTS]
        return WorkerUse(
            at_s=now_s,
            mailbox=self._mailbox,
            models=self._models,
            requests=[_open(stream, now_s) for stream in oldest],
        )

    async def publish(self, index: int) -> None:
        """Until cancelled."""
        while True:
            if self._changed or self._streams:
                self._changed = bool(self._streams)
                text = msgspec.json.encode(self.document(time.time())).decode()
                with contextlib.suppress(StoreError):
                    await self._store.put_doc(document_name(index), text)
            await asyncio.sleep(PUBLISH_S)


def _open(stream: RequestStream, now_s: float) -> OpenRequest:
    state = "streaming" if stream.first_token_s is not None else "queued"
    if stream.first_token_s is None and stream.progress is not None:
        state = stream.progress.state
    return OpenRequest(
        id=stream.id,
        model=stream.model,
        state=state,
        device=stream.device,
        waited_s=round(now_s - stream.arrival_s, 3),
        tokens=len(stream.log.tokens),
    )


async def holders(store: Store, workers: int, request_id: str) -> list[tuple[str, str]]:
    """Mailbox and id of every open choice of ``request_id``, whichever worker has it."""
    found = []
    for one in await _documents(store, workers):
        ids = [r.id for r in one.requests if r.id == request_id or r.id.startswith(request_id + "-")]
        found += [(one.mailbox, each) for each in ids]
    return found


async def _documents(store: Store, workers: int) -> list[WorkerUse]:
    texts = [await store.doc(document_name(index)) for index in range(workers)]
    return [msgspec.json.decode(text, type=WorkerUse) for text in texts if text is not None]


async def merged(store: Store, workers: int) -> WorkerUse:
    """All workers' documents as one."""
    total = WorkerUse(at_s=0.0, mailbox="", models={}, requests=[])
    for one in await _documents(store, workers):
        total.at_s = max(total.at_s, one.at_s)
        total.requests += one.requests
        for model, use in one.models.items():
            total.models.setdefault(model, ModelUse()).add(use)
    return total
