"""Mailboxes over ipc sockets in a private directory (no network)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator

import pytest

from prism.core.errors import InvalidValue
from prism.wire.mailbox import HIGH_WATER_MESSAGES, Inbox, Outbox
from prism.wire.messages import Cancel
from tests.patience import PATIENCE_S


@pytest.fixture
def base() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="prism-") as path:
        yield f"ipc://{path}"


async def test_messages_arrive_in_order_and_junk_is_counted(base: str) -> None:
    with Inbox(f"{base}/in") as inbox, Outbox() as outbox:
        assert outbox.send(inbox.address, Cancel(id="1", reason="a"))
        assert outbox.send_bytes(inbox.address, b"\xff\xff junk")
        assert outbox.send(inbox.address, Cancel(id="2", reason="b"))
        async with asyncio.timeout(PATIENCE_S):
            got = [await inbox.recv(), await inbox.recv()]
        assert [getattr(message, "id", None) for message in got] == ["1", "2"]
        assert inbox.malformed == 1


async def test_sending_before_the_receiver_exists_is_not_lost(base: str) -> None:
    with Outbox() as outbox:
        assert outbox.send(f"{base}/later", Cancel(id="1", reason=""))
        with Inbox(f"{base}/later") as inbox:
            async with asyncio.timeout(PATIENCE_S):
                assert await inbox.recv() == Cancel(id="1", reason="")


async def test_a_full_buffer_refuses_instead_of_blocking(base: str) -> None:
    with Outbox() as outbox:
        message = Cancel(id="x", reason="")
        sent = sum(outbox.send(f"{base}/nobody", message) for _ in range(HIGH_WATER_MESSAGES + 10))
        assert sent == HIGH_WATER_MESSAGES and outbox.refused == 10
        outbox.forget(f"{base}/nobody")


async def test_drain_takes_what_is_here(base: str) -> None:
    with Inbox(f"{base}/in") as inbox, Outbox() as outbox:
        for i in range(50):
            outbox.send(inbox.address, Cancel(id=str(i), reason=""))
        async with asyncio.timeout(PATIENCE_S):
            rest: list[object] = [await inbox.recv()]
            while len(rest) < 50:
                rest += inbox.drain()
                await asyncio.sleep(0.001)
        assert [getattr(message, "id", None) for message in rest] == [str(i) for i in range(50)]


async def test_closing_ends_the_reader(base: str) -> None:
    inbox = Inbox(f"{base}/in")

    async def read() -> int:
        return sum([1 async for _ in inbox])

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)  # it waits for the first message
    inbox.close()
    inbox.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader == 0


@pytest.mark.parametrize("address", ["", "udp://x", "ipc://", "ipc:///" + "x" * 120])
def test_bad_addresses_say_what_is_allowed(address: str) -> None:
    with pytest.raises(InvalidValue, match="mailbox"), Outbox() as outbox:
        outbox.send(address, Cancel(id="x", reason=""))
