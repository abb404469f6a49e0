"""A machine that leaves waits for those who take its KV, and says what it gave up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prism.kv.exchange import fetch_kv
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.node.kv_handover import KvHandover
from prism.node.leaving import Leaving
from prism.transfer.errors import SourceLost
from tests.kv.nodes import KvNode
from tests.kv.rows import ArrayRows
from tests.patience import PATIENCE_S, happens

MARK, OTHER, FAST = "fingerprint", "others", 1e9
BOUND = 1 << 24


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


async def test_a_taker_that_fails_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SourceLost("in the middle")

    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    monkeypatch.setattr("prism.kv.exchange._fetch_batch", fail)
    with pytest.raises(SourceLost):
        await asyncio.to_thread(pair.take, MARK)
    await task
    assert pair.giver.offers.taken == {MARK: ("taker", 0)}


async def test_a_taker_without_room_takes_what_it_can(pair: Pair) -> None:
    task = await begun(pair)
    pair.handover.told({MARK: "taker", OTHER: ""})
    came = await asyncio.to_thread(pair.take, MARK, pair.handover.held[MARK] // 2)
    await task
    assert 0 < came < pair.handover.held[MARK] and pair.giver.offers.taken == {MARK: ("taker", came)}


async def test_models_go_first_then_kv_and_both_within_the_bound(pair: Pair) -> None:
    busy = True
    leaving = Leaving(lambda: busy, pair.changed, pair.handover)
    task = asyncio.create_task(leaving.run(PATIENCE_S))
    await happens(lambda: leaving.begun, "its beginning")
    assert not pair.handover.held, "its models are here"
    busy = False
    await happens(lambda: pair.handover.held, "the report")
    assert not leaving.done
    pair.handover.told({MARK: "", OTHER: ""})
    await task
    assert leaving.done
    over = Leaving(lambda: True, pair.changed, KvHandover(pair.giver.offers, pair.changed))
    await over.run(0.0)
    assert over.done


async def test_without_kv_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    node = KvNode("giver", HostPool(tmp_path / "giver", BOUND))
    await KvHandover(node.offers, asyncio.Event()).run(PATIENCE_S)
    node.server.close()
