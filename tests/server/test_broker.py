"""What the front door does about requests that the store does not show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prism.core.ids import ModelName
from prism.server import broker
from prism.server.broker import Broker
from prism.server.stream import RequestStream
from prism.wire.messages import Submission
from tests.patience import PATIENCE_S, happens

MODEL = ModelName("m")


class BusyStore:
    """Takes requests when it is told to, and never shows one."""

    def __init__(self) -> None:
        self.takes, self.looks = asyncio.Event(), 0

    async def add_to_least(self, *_: object) -> str:
        await self.takes.wait()
        return "queue"

    async def where(self, ids: list[str]) -> list[str | None]:
        self.looks += 1
        return [None] * len(ids)


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Broker, BusyStore]]:
    monkeypatch.setattr(broker, "AUDIT_S", 0.01)
    monkeypatch.setattr(broker, "LOST_AFTER_S", 0.0)
    store, inbox = BusyStore(), SimpleNamespace(keys=None, address="", pending=lambda: False)
    places = SimpleNamespace(waiting=0, queues_for_one=lambda model: ["queue"])
    made = Broker(cast(Any, store), cast(Any, inbox), cast(Any, places), max_queue=10)
    audit = asyncio.create_task(made._audit())
    yield made, store
    audit.cancel()
    await asyncio.gather(audit, return_exceptions=True)
    made.outbox.close()


def request(id: str) -> tuple[RequestStream, Submission]:
    sink = SimpleNamespace(forget=lambda stream: None)
    stream = RequestStream(id, MODEL, cast(Any, sink), asyncio.Event(), True, 1, [1], 3, arrival_s=0.0)
    return stream, Submission(
        id=id,
        model=MODEL,
        front="",
        arrival_s=0.0,
        prompt_tokens=1,
        max_new_tokens=3,
        slo_ttft_s=1.0,
        slo_tpot_s=1.0,
        max_wait_s=60.0,
        late="serve",
        payload=b"",
    )


async def test_a_request_that_a_busy_store_has_not_taken_yet_is_not_lost(front: tuple[Broker, BusyStore]) -> None:
    door, store = front
    taken, submission = request("taken")
    store.takes.set()
    await door.submit(taken, submission)
    store.takes.clear()
    under_way, submission = request("under way")
    submitting = asyncio.create_task(door.submit(under_way, submission))
    async with asyncio.timeout(PATIENCE_S):
        await happens(lambda: taken.error, "what the store took and does not have being lost")
        looks = store.looks
        door.streams["another"] = request("another")[0]
        door.streams["another"].queued = True  # so that there is something to look for
        await happens(lambda: store.looks > looks + 2, "further looks")
    assert taken.error is not None and taken.error.code == "request_lost"
    assert under_way.error is None
    store.takes.set()
    await submitting
    await happens(lambda: under_way.error, "the same of this one, once it was taken")
