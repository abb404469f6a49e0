"""The end of a worker: announced when the process is gone and with its cause, or when nobody is left to tell."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from prism.core.ids import DeviceId
from prism.engine.commands import Parked
from prism.engine.link import WorkerLink, WorkerOwner


async def ended_channel() -> tuple[WorkerLink, asyncio.Task[None]]:
    """A worker whose channel has just closed, and the task that reads it."""
    link, reader = WorkerLink("w1", DeviceId("n/host:0"), 1, Mock(spec=WorkerOwner)), asyncio.StreamReader()
    reader.feed_eof()
    reading = asyncio.create_task(
        link.attach(Parked(worker="w1", pid=7, owner="o"), reader, Mock(spec=asyncio.StreamWriter))
    )
    for _ in range(10):
        await asyncio.sleep(0)
    assert not link.gone.is_set(), "its process may still hold memory"
    return link, reading


async def test_the_zygote_says_how_a_worker_ended() -> None:
    link, reading = await ended_channel()
    link.exited(-9)
    await reading
    assert link.gone.is_set() and "SIGKILL" in link.describe_end()


async def test_without_a_zygote_nobody_says_it() -> None:
    link, reading = await ended_channel()
    link.unwitnessed()
    await reading
    assert link.gone.is_set() and link.describe_end().endswith("ended")


@pytest.mark.parametrize("status", [0, 3])
async def test_a_worker_that_never_opened_its_channel(status: int) -> None:
    link = WorkerLink("w1", DeviceId("n/host:0"), 1, Mock(spec=WorkerOwner))
    link.exited(status)
    assert link.gone.is_set() and link.parked.cancelled() and f"status {status}" in link.describe_end()


async def test_a_worker_that_ended_before_it_changed_hands_is_told_to_its_new_owner() -> None:
    first, second = Mock(spec=WorkerOwner), Mock(spec=WorkerOwner)
    link = WorkerLink("w1", DeviceId("n/host:0"), 1, first)
    link.exited(1)
    first.on_gone.assert_called_once_with(link)
    link.hand_to(second)
    second.on_gone.assert_called_once_with(link)
