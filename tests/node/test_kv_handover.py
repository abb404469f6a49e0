"""A machine that leaves waits for those who take its KV, and says what it gave up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prism.kv.exchange import LEAF_BYTES, fetch_kv
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.node.kv_handover import KvHandover
from prism.node.leaving import LOOK_S, Leaving
from prism.transfer.errors import SourceLost
from tests.kv.nodes import KvNode
from tests.kv.rows import ArrayRows
from tests.patience import PATIENCE_S, happens

MARK, OTHER, FAST = "fingerprint", "others", 1e9
BOUND = 1 << 24
FOR_EVER_S = 1e6


class Pair:
    """A machine that leaves, with KV of two models, and one that may take it."""

    def __init__(self, folder: Path) -> None:
        self.giver, self.taker = (KvNode(name, HostPool(folder / name, BOUND)) for name in ("giver", "taker"))
        self.changed = asyncio.Event()
        self.handover = KvHandover(self.giver.offers, self.changed)
        for mark, tokens in ((MARK, 200), (OTHER, 64)):
            keeper = KvKeeper(self.giver.pool, f"{mark} sglang/tp1/rank0/float32", 1.0)
            keeper.attach(ArrayRows((2048, 512), 600, seed=3))
            keeper.keep(np.arange(tokens), np.arange(tokens), "", 0, 60.0)

    def take(self, mark: str, most: int = BOUND) -> int:
        return fetch_kv(self.taker.offers, self.taker.server, self.giver.holder, mark, FAST, most)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for node in (made.giver, made.taker):
        node.server.close()


async def begun(pair: Pair, limit_s: float = PATIENCE_S) -> asyncio.Task[None]:
    task = asyncio.create_task(pair.handover.run(limit_s))
    await happens(lambda: pair.handover.held, "the report")
    assert pair.changed.is_set() and pair.handover.held == pair.giver.pool.held_bytes()
    return task


async def test_it_stays_until_all_was_taken(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await asyncio.to_thread(pair.take, MARK)  # before: what is stored since then would be missing
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: "taker"})
    for mark in (OTHER, MARK):
        assert not task.done()
        await asyncio.to_thread(pair.take, mark)
    await task
    assert pair.taker.pool.held_bytes() == pair.giver.pool.held_bytes()
    assert "gave up" not in caplog.text
    held = pair.handover.held[MARK]
    assert f"taker has {held} of {held} bytes of KV of the weights {MARK}" in caplog.text


async def test_at_the_bound_it_says_what_it_gives_up(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    await pair.handover.run(0.0)
    assert f"gave up {pair.handover.held[MARK]} bytes of KV of the weights {MARK}: the controller" in caplog.text
    pair.handover.told({MARK: "taker", OTHER: ""})
    await pair.handover.run(0.0)
    assert f"the weights {MARK}: taker had not taken it" in caplog.text


async def test_nobody_is_waited_for_where_nobody_can_take_it(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    task = await begun(pair)
    pair.handover.told({MARK: "", OTHER: ""})
    await task
    assert caplog.text.count("no other machine keeps KV") == 2


async def test_a_taker_that_fails_is_given_up_and_another_one_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise SourceLost("in the middle")

    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    pair.changed.clear()
    with monkeypatch.context() as broken:
        broken.setattr("prism.kv.exchange._fetch_batch", fail)
        with pytest.raises(SourceLost):
            await asyncio.to_thread(pair.take, MARK)
    await happens(lambda: pair.handover.failed == {MARK: ["taker"]}, "the report of it")
    assert pair.changed.is_set() and not task.done()
    pair.handover.told({MARK: "taker", OTHER: ""})  # the answer to an earlier report
    pair.handover.told({MARK: "", OTHER: ""})
    await task
    assert pair.giver.offers.taking.taken == {}
    assert f"the weights {MARK}: no other machine keeps KV after taker" in caplog.text


async def test_what_a_taker_that_was_given_up_brings_after_all_counts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("prism.node.kv_handover.STALL_S", 0.0)
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    await happens(lambda: pair.handover.failed == {MARK: ["taker"]}, "the report of it")
    assert not task.done(), "the controller may know another one"
    await asyncio.to_thread(pair.take, MARK)
    await task
    held = pair.handover.held[MARK]
    assert f"taker has {held} of {held} bytes of KV of the weights {MARK}" in caplog.text


async def test_each_leaf_that_goes_out_is_heard_of(pair: Pair) -> None:
    """So that a slow taker is not taken for one that stands still."""
    taking = pair.giver.offers.taking
    heard: list[float] = []
    taking.heard = lambda *marks: heard.extend(1.0 if mark == MARK else 0.0 for mark in marks)  # type: ignore[method-assign]
    await asyncio.to_thread(pair.take, MARK)
    leaves = -(-pair.giver.pool.held_bytes()[MARK] // LEAF_BYTES)
    assert leaves > 1 and heard == [1.0] * (leaves + 3), "each, the two questions, and that it has everything"


async def test_a_controller_that_answers_nothing_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prism.node.kv_handover.SILENT_S", 0.0)
    task = await begun(pair, FOR_EVER_S)
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert caplog.text.count("the controller named nobody to take it") == 2


async def test_a_taker_that_was_named_is_waited_for_without_a_controller(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    monkeypatch.setattr("prism.node.kv_handover.SILENT_S", 0.0)
    await asyncio.to_thread(pair.take, MARK, 0)
    await task
    assert pair.giver.offers.taking.taken == {MARK: ("taker", 0)}


async def test_who_takes_it_is_not_dropped_for_a_controller_that_knows_nobody(pair: Pair) -> None:
    """Another one has begun meanwhile and has not heard of all machines."""
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    pair.handover.told({MARK: "", OTHER: ""})
    await asyncio.sleep(4 * LOOK_S)
    assert not task.done()
    await asyncio.to_thread(pair.take, MARK)
    await task
    assert pair.giver.offers.taking.taken[MARK][0] == "taker"


async def test_a_taker_without_room_takes_what_it_can(pair: Pair) -> None:
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    came = await asyncio.to_thread(pair.take, MARK, pair.handover.held[MARK] // 2)
    await task
    assert 0 < came < pair.handover.held[MARK] and pair.giver.offers.taking.taken == {MARK: ("taker", came)}


async def test_models_go_first_then_kv_and_both_within_the_bound(pair: Pair) -> None:
    models = ["a"]
    leaving = Leaving(lambda: bool(models), lambda: 0, pair.changed, pair.handover)
    task = asyncio.create_task(leaving.run(PATIENCE_S))
    await happens(lambda: leaving.begun, "its beginning")
    assert not pair.handover.held, "its models are here"
    models.clear()
    await happens(lambda: pair.handover.held, "the report")
    assert not leaving.done
    pair.handover.told({MARK: "", OTHER: ""})
    await task
    assert leaving.done
    over = Leaving(lambda: True, lambda: 1, pair.changed, KvHandover(pair.giver.offers, pair.changed))
    await over.run(0.0)
    assert over.done


async def test_without_a_controller_what_runs_is_answered_and_models_are_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism.node.leaving.ALONE_S", 0.0)
    requests = 1
    leaving = Leaving(lambda: True, lambda: requests, pair.changed, pair.handover)
    task = asyncio.create_task(leaving.run(FOR_EVER_S))
    await happens(lambda: leaving.begun, "its beginning")
    await asyncio.sleep(4 * LOOK_S)
    assert not task.done(), "who answers is not replaced"
    requests = 0
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert leaving.done and not pair.handover.held


async def test_without_kv_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    node = KvNode("giver", HostPool(tmp_path / "giver", BOUND))
    await KvHandover(node.offers, asyncio.Event()).run(PATIENCE_S)
    node.server.close()
