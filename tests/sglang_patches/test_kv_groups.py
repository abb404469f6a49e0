"""One lease over several groups: memory for a request in all of them or in none, one wish, every kind of cache given
up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prism import memory
from prism.memory import GroupKind, KvGroup
from sglang_patches import kv_lease
from sglang_patches.kv_demand import GroupDemand, demand_states, demand_tokens, demand_window
from sglang_patches.kv_group_lease import GroupLease
from sglang_patches.kv_lease import KvLease

PAGE = 65536
PAGES = 16
BLOCK = 128  # tokens a page, in both groups
WINDOW = 100
LAYOUT = memory.KvLayout(layers=2, kv_heads=1, head_dim=PAGE // BLOCK // 8, dtype_bytes=2)


def request(prompt: int, new: int = 10) -> SimpleNamespace:
    return SimpleNamespace(
        rid=str(prompt),
        origin_input_ids=[0] * prompt,
        output_ids=[],
        prefix_indices=[],
        sampling_params=SimpleNamespace(max_new_tokens=new),
        finished=lambda: False,
    )


class Tree:
    """A prefix cache that holds slots of both groups."""

    sliding_window_size = WINDOW

    def __init__(self) -> None:
        self.cached: dict[GroupKind, list[np.ndarray]] = {GroupKind.TOKENS: [], GroupKind.WINDOW: []}

    def evictable_size(self) -> int:
        return sum(map(len, self.cached[GroupKind.TOKENS]))

    def swa_evictable_size(self) -> int:
        return sum(map(len, self.cached[GroupKind.WINDOW]))


class Engine:
    """A lease over two groups and as much of SGLang's scheduler as it looks at."""

    def __init__(self, device: memory.Device, name: str = "engine") -> None:
        self.owner = device.register(name)
        pools = [
            self.owner.arena(4 * PAGES * PAGE).divide(LAYOUT, max_tokens=PAGES * BLOCK, lease_bytes=0) for _ in range(2)
        ]
        kinds = (GroupKind.TOKENS, GroupKind.WINDOW)
        self.full, self.window = (KvGroup(k, p, PAGES * BLOCK) for k, p in zip(kinds, pools, strict=True))
        seat: Any = SimpleNamespace(owner=self.owner, world=1)
        self.lease = KvLease([GroupLease(self.full), GroupLease(self.window)], seat)
        self.tree_cache = Tree()
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.max_running_requests = 8
        self.chunked_prefill_size = 4 * BLOCK
        self.waiting_queue: list[Any] = []
        self.new_token_ratio_tracker = SimpleNamespace(current=1.0)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)

    @property
    def pages(self) -> tuple[int, int]:
        return self.full.pool.lease_bytes // PAGE, self.window.pool.lease_bytes // PAGE

    def available(self) -> tuple[int, int]:
        full, window = (part.available() for part in self.lease.parts)
        return full, window

    def cache(self, group: KvGroup, tokens: int) -> None:
        assert group.pool.ensure(tokens)
        self.tree_cache.cached[group.kind] += np.split(group.pool.alloc(tokens), range(1, tokens))


def evict(scheduler: Any, tokens: int, part: Any) -> bool:
    cached = scheduler.tree_cache.cached
    gone, cached[part.group.kind] = cached[part.group.kind][:tokens], cached[part.group.kind][tokens:]
    if gone:
        part.pool.free(np.concatenate(gone))
    return bool(gone)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> memory.Device:
    monkeypatch.setattr(kv_lease, "evict", evict)
    return memory.open_device("host:0", PAGES * PAGE, account_dir=tmp_path, page_bytes=PAGE)


def test_a_request_gets_its_tokens_and_its_window(device: memory.Device) -> None:
    engine = Engine(device)
    engine.waiting_queue = [request(6 * BLOCK)]
    engine.lease.before_step(engine)
    full, window = engine.available()
    assert full >= 6 * BLOCK + 10 and 4 * BLOCK <= window < 6 * BLOCK, "no more than a chunk of the layers with windows"
    assert engine.lease.available_tokens() == full


def test_memory_is_taken_in_both_groups_or_in_none(device: memory.Device) -> None:
    engine, other = Engine(device), device.register("other")
    other.reserve(8 * PAGE, "weights")
    assert engine.pages == (1, 1)
    engine.waiting_queue = [request(5 * BLOCK)]  # 6 pages for tokens fit beside nothing of the 5 for the window
    engine.lease.before_step(engine)
    assert engine.pages == (1, 1) and device.free_bytes() == 6 * PAGE


def test_what_both_groups_lack_is_one_wish(device: memory.Device) -> None:
    engine, other = Engine(device), Engine(device, "other")
    other.cache(other.full, 12 * BLOCK)
    engine.waiting_queue = [request(3 * BLOCK), request(BLOCK)]
    engine.lease.before_step(engine)
    lacks = 3 * PAGE + 3 * PAGE  # beyond the first page of each, which is there
    assert engine.owner.wished_bytes >= lacks
    other.lease.rest(other)
    assert other.pages[0] < 13
    engine.lease.before_step(engine)
    full, window = engine.available()
    assert full > 3 * BLOCK and window > 3 * BLOCK and engine.owner.wished_bytes == 0


def test_caches_of_both_kinds_go_when_others_wait(device: memory.Device) -> None:
    engine, other = Engine(device), device.register("other")
    engine.cache(engine.full, 4 * BLOCK)
    engine.cache(engine.window, 6 * BLOCK)
    engine.lease.rest(engine)
    held = sum(engine.pages)
    other.wish(9 * PAGE, 9 * PAGE)
    engine.lease.rest(engine)
    tree = engine.tree_cache
    assert tree.evictable_size() == 0, "whole prefixes go first"
    assert 0 < tree.swa_evictable_size() < 6 * BLOCK and sum(engine.pages) < held
    other.reserve(9 * PAGE, "kv")
    for group in (engine.full, engine.window):
        group.pool.check()


def test_above_its_limit_the_larger_group_shrinks(device: memory.Device) -> None:
    engine = Engine(device)
    engine.running_batch.reqs = [request(BLOCK)]
    engine.full.pool.ensure(6 * BLOCK)
    engine.full.pool.alloc(6 * BLOCK)
    engine.window.pool.alloc(BLOCK // 2)
    device.set_limit(engine.owner.id, 3 * PAGE)
    engine.lease.before_step(engine)
    full, window = engine.available()
    assert full == 0 and window > 0, "SGLang retracts for want of slots for tokens"


def test_the_window_is_what_a_sequence_needs_of_layers_that_see_one() -> None:
    scheduler: Any = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[request(500)]),
        last_batch=None,
        chunked_req=None,
        max_running_requests=4,
        chunked_prefill_size=300,
        tree_cache=SimpleNamespace(sliding_window_size=WINDOW),
        waiting_queue=[request(10), request(200), request(1000)],
        new_token_ratio_tracker=SimpleNamespace(current=0.0),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )
    assert demand_window(scheduler, 1) == GroupDemand(16, [102, 102 + 202, 102 + 202 + 302], alone=102)
    assert demand_window(scheduler, 64).admissions == [128, 128 + 256, 128 + 256 + 320]
    scheduler.chunked_req = request(1000)
    assert demand_window(scheduler, 1).running == 16 + 300
    assert demand_states(scheduler, 3) == GroupDemand(2, [3, 6, 9], alone=3)


def test_pages_of_tokens_are_counted_whole() -> None:
    scheduler: Any = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[request(5), request(5)]),
        last_batch=None,
        chunked_req=None,
        max_running_requests=4,
        waiting_queue=[request(10, 5)],
        new_token_ratio_tracker=SimpleNamespace(current=0.0),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )
    assert demand_tokens(scheduler, 32, 32) == GroupDemand(64, [96], alone=70), "32 + 5 + a page and one token more"
