"""Pages: nothing is lost, nothing is granted twice, whatever engines, caches and retractions do."""

from __future__ import annotations

from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from prism.core.effects import decision_line
from prism.sim.account import Account
from prism.sim.kv import KvMemory
from prism.sim.queue import EventQueue
from tests.sim.helpers import h100s, random_rows, run, tiny_spec

PAGE = 1 << 20


def conserved(account: Account, weights_pages: int = 0) -> None:
    assert account.free_pages >= 0
    mapped_pages = sum(kv.mapped_pages for kv in cast(list[KvMemory], account.tenants))
    assert account.free_pages + weights_pages + mapped_pages == account.capacity_pages


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-400, 400)), max_size=60), st.integers(5, 40))
def test_growing_and_shrinking_conserves_pages(moves: list[tuple[int, int]], pages: int) -> None:
    queue = EventQueue()
    account = Account(queue, pages * PAGE, PAGE)
    memories = [
        KvMemory([account], 50_000, 16),
        KvMemory([account], 3_000, 16),
        KvMemory([account], 7_000, 16, 4 * PAGE),
    ]
    for index, tokens in moves:
        kv = memories[index]
        before = kv.used_tokens
        if tokens >= 0:
            room, granted = kv.available_tokens(), kv.grow(tokens)
            assert granted == (tokens <= room)
            assert kv.used_tokens == before + (tokens if granted else 0)
        else:
            kv.shrink(min(-tokens, before))
        assert memories[2].mapped_pages <= 4
        for each in memories:
            assert each.mapped_pages == each.pages_for(each.used_tokens)
        conserved(account)
    for kv in memories:
        kv.close()
    assert account.free_pages == account.capacity_pages


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(900, 1600), st.sampled_from(["prism", "muxserve", "static", "qlm"]))
def test_after_a_run_all_kv_is_free_and_every_request_has_ended(seed: int, memory_mb: int, policy: str) -> None:
    models = tuple(tiny_spec(f"m{i}") for i in range(3))
    rows = random_rows([m.name for m in models], seed, 40, 10.0, prompt=4000, output=1500, blocks=3)
    result, _ = run(h100s(1, memory=f"{memory_mb}MiB"), models, rows, policy)
    assert len(result.world.recorder.records) == len(rows)
    assert not result.world.stuck()
    for device in result.world.devices.values():
        weights = sum(shard.weight_bytes for shard in device.shards.values()) // device.account.page_bytes
        conserved(device.account, weights)
        for engine in device.engines.values():
            assert engine.kv.used_tokens == 0
            assert engine.used_tokens_now() == 0
        assert device.account.ahead_pages() == 0
    for record in result.world.recorder.records:
        assert record.error or record.output_tokens == rows[record.row].output_tokens


def test_decisions_have_stable_lines() -> None:
    models = (tiny_spec("m0"),)
    rows = random_rows(["m0"], 1, 5, 1.0)
    first, log = run(h100s(1), models, rows)
    second, again = run(h100s(1), models, rows)
    assert log == again
    assert first.stats.decision_digest == second.stats.decision_digest
    assert decision_line is not None
