"""Queues: what every store must do, whichever server is behind it."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from prism.policy.routing import least_loaded, queue_load
from prism.store.interface import Store
from prism.store.values import QueueFull
from tests.patience import PATIENCE_S

Q, R = "prism:queue:test", "prism:queue:other"
IDLE_S = 0.2


async def test_oldest_first_and_only_once(store: Store) -> None:
    for i in range(5):
        assert await store.add(Q, f"r{i}", b"%d" % i) == i + 1
    first = await store.read_new([Q], "a", 3, 0)
    rest = await store.read_new([Q], "b", 10, 0)
    assert [e.request_id for e in first + rest] == ["r0", "r1", "r2", "r3", "r4"]
    assert [e.data for e in first] == [b"0", b"1", b"2"]
    assert await store.read_new([Q], "a", 10, 0) == []
    assert await store.lengths([Q, R]) == [5, 0]


async def test_reading_waits_for_the_first_entry(store: Store) -> None:
    reader = asyncio.create_task(store.read_new([Q, R], "a", 10, PATIENCE_S))
    await asyncio.sleep(0.05)  # so that it most likely waits; what follows holds either way
    await store.add(R, "late", b"x")
    assert [e.request_id for e in await reader] == ["late"]


async def test_an_id_is_added_once(store: Store) -> None:
    await store.add(Q, "same", b"1")
    await store.add(Q, "same", b"1")
    await store.add(R, "same", b"1")
    assert await store.lengths([Q, R]) == [1, 0]


async def test_a_full_queue_refuses_with_numbers(store: Store) -> None:
    await store.add(Q, "one", b"", 2)
    await store.add(Q, "two", b"", 2)
    with pytest.raises(QueueFull) as refused:
        await store.add(Q, "three", b"", 2)
    assert (refused.value.length, refused.value.limit) == (2, 2)
    assert await store.add(Q, "two", b"", 2) == 2, "a repeated call of an accepted request is not refused"


async def test_a_request_goes_to_the_least_loaded_queue(store: Store) -> None:
    """As the policy has it, which the Redis store's scripts have a copy of."""
    queues = [f"{Q}:{i}" for i in range(4)]
    draw = random.Random(5)
    running: dict[str, int] = {}
    for number in range(80):
        if number % 3 == 0:
            told = draw.choice(queues[1:])  # of the first nothing is known
            running[told] = draw.randrange(12)
            await store.tell_running(told, running[told])
        lengths = dict(zip(queues, await store.lengths(queues), strict=True))
        least = least_loaded(queues, lambda queue: queue_load(lengths[queue], running.get(queue)))  # noqa: B023
        if number % 2:
            assert await store.add_to_least(queues, f"r{number}", b"") == least
        else:
            await store.add(R, f"r{number}", b"")
            [entry] = await store.read_new([R], "a", 1, 0)
            assert await store.move_to_least(entry, "a", queues, b"moved")
            assert await store.where([entry.request_id]) == [least]
            assert await store.move_to_least(entry, "a", queues, b"moved"), "the first reply may have been lost"
        assert sum(await store.lengths(queues)) == number + 1
    assert await store.add_to_least([R], "r1", b"") in queues, "where it stands already"
    with pytest.raises(QueueFull):
        await store.add_to_least([R, Q], "one more", b"", 0)


async def test_a_queue_is_forgotten_when_nothing_stands_in_it(store: Store) -> None:
    await store.add(Q, "first", b"")
    await store.tell_running(Q, 0)
    await store.forget(Q)
    assert await store.lengths([Q]) == [1]
    [entry] = await store.read_new([Q], "a", 1, 0)
    assert await store.done(entry, "a")
    assert await store.add_to_least([R, Q], "told", b"") == R, "as many stand in both, the first is taken"
    assert await store.add_to_least([R, Q], "waits", b"") == Q
    assert await store.add_to_least([R, Q], "nine", b"") == R, "one that waits weighs nine times as much"
    for entry in await store.read_new([Q, R], "a", 9, 0):
        await store.done(entry, "a")
    await store.forget(Q)
    await store.forget(Q)
    for name in ("a", "b", "c", "d"):
        await store.add_to_least([R, Q], name, b"")
    assert await store.lengths([Q, R]) == [2, 2], "what was told of it is forgotten"


async def test_who_waits_at_a_forgotten_queue_reads_on(store: Store) -> None:
    reader = asyncio.create_task(store.read_new([Q], "a", 10, PATIENCE_S))
    await asyncio.sleep(0.05)  # so that it most likely waits; what follows holds either way
    await store.forget(Q)
    await store.add(Q, "late", b"x")
    found = await reader or await store.read_new([Q], "a", 10, PATIENCE_S)
    assert [e.request_id for e in found] == ["late"]


async def test_done_removes_and_may_be_repeated(store: Store) -> None:
    await store.add(Q, "r", b"")
    [entry] = await store.read_new([Q], "a", 1, 0)
    assert await store.done(entry, "a")
    assert await store.done(entry, "a")
    assert await store.lengths([Q]) == [0]
    assert await store.position("r") is None


async def test_ownership_is_the_fence(store: Store) -> None:
    await store.add(Q, "r", b"x")
    [old] = await store.read_new([Q], "dead", 1, 0)
    [new] = await store.take_over(Q, "heir", 0.0)
    assert (new.request_id, new.data, new.deliveries) == ("r", b"x", 2)
    assert not await store.done(old, "dead")
    assert not await store.move(old, "dead", R)
    assert await store.lengths([Q, R]) == [1, 0]
    assert await store.owned(Q, "heir") == ["r"]
    assert await store.owned(Q, "dead") == []
    assert await store.done(new, "heir")


async def test_a_beaten_entry_is_not_taken_over(store: Store) -> None:
    await store.add(Q, "r", b"")
    await store.read_new([Q], "alive", 1, 0)
    await asyncio.sleep(IDLE_S)
    assert await store.take_over(Q, "heir", 2 * PATIENCE_S) == []
    began_s = time.monotonic()
    assert await store.beat(Q, "alive") == 1
    taken = await store.take_over(Q, "heir", IDLE_S)
    assert taken == [] or time.monotonic() - began_s >= IDLE_S
    async with asyncio.timeout(PATIENCE_S):
        while not taken:
            taken = await store.take_over(Q, "heir", IDLE_S)
            await asyncio.sleep(0.01)
    assert len(taken) == 1


async def test_take_over_skips_own_entries_and_stops_at_count(store: Store) -> None:
    for i in range(6):
        await store.add(Q, f"r{i}", b"")
    await store.read_new([Q], "me", 2, 0)
    await store.read_new([Q], "dead", 4, 0)
    assert len(await store.take_over(Q, "me", 0.0, count=3)) == 3
    assert len(await store.take_over(Q, "me", 0.0)) == 1
    assert len(await store.owned(Q, "me")) == 6


async def test_move_is_atomic_and_repeatable(store: Store) -> None:
    await store.add(Q, "r", b"old")
    [entry] = await store.read_new([Q], "a", 1, 0)
    assert await store.move(entry, "a", R, b"new")
    assert await store.move(entry, "a", R, b"new"), "the first reply may have been lost"
    assert await store.lengths([Q, R]) == [0, 1]
    [moved] = await store.read_new([R], "b", 1, 0)
    assert (moved.request_id, moved.data) == ("r", b"new")


async def test_where_names_the_queue(store: Store) -> None:
    await store.add(Q, "a", b"")
    await store.add(R, "b", b"")
    assert await store.where(["a", "nowhere", "b"]) == [Q, None, R]
    assert await store.where([]) == []


async def test_withdraw_before_and_after_reading(store: Store) -> None:
    await store.add(Q, "waiting", b"")
    gone = await store.withdraw("waiting")
    assert (gone.removed, gone.queue) == (True, Q)
    await store.add(Q, "running", b"")
    await store.read_new([Q], "agent", 1, 0)
    kept = await store.withdraw("running")
    assert (kept.removed, kept.queue, kept.owner) == (False, Q, "agent")
    assert not (await store.withdraw("unknown")).removed
    assert await store.lengths([Q]) == [1]


async def test_position_counts_what_stands_before(store: Store) -> None:
    for i in range(3):
        await store.add(Q, f"r{i}", b"")
    assert [await store.position(f"r{i}") for i in range(3)] == [0, 1, 2]
    [first] = await store.read_new([Q], "a", 1, 0)
    await store.done(first, "a")
    assert await store.position("r2") == 1
