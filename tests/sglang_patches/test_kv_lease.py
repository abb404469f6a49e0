"""The lease before each step: what an engine takes, wishes for and gives back; real pools, a pretended SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prism import memory
from sglang_patches import kv_demand, kv_lease
from sglang_patches.kv_demand import GroupDemand, demand_tokens
from sglang_patches.kv_group_lease import GroupLease
from sglang_patches.kv_lease import KvLease

PAGE = 65536
PAGES = 16
BLOCK = 128  # tokens a page: sequences share blocks
SMALL_BLOCK = 32  # sequences have blocks of their own
NUMBERS = count()


def request(prompt: int, new: int, output: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        rid=f"r{next(NUMBERS)}",
        origin_input_ids=[0] * prompt,
        output_ids=[0] * output,
        prefix_indices=[],
        sampling_params=SimpleNamespace(max_new_tokens=new),
        finished=lambda: False,
    )


class Engine:
    """A lease and as much of SGLang's scheduler as it looks at; one request at a time is admitted, as SGLang would."""

    def __init__(self, device: memory.Device, name: str, block: int = BLOCK) -> None:
        self.owner = device.register(name)
        layout = memory.KvLayout(layers=2, kv_heads=1, head_dim=PAGE // block // 8, dtype_bytes=2)
        self.pool = self.owner.arena(4 * PAGES * PAGE).divide(layout, max_tokens=PAGES * block, lease_bytes=0)
        seat: Any = SimpleNamespace(owner=self.owner, world=1)
        group = memory.KvGroup(memory.GroupKind.TOKENS, self.pool, PAGES * block)
        self.lease = KvLease([GroupLease(group)], seat)
        self.cache: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []
        self.tree_cache = SimpleNamespace(evictable_size=lambda: sum(map(len, self.cache)))
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.max_running_requests, self.chunked_prefill_size = 32, 512
        self.waiting_queue: list[Any] = []
        self.new_token_ratio_tracker = SimpleNamespace(current=1.0)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)

    @property
    def lease_pages(self) -> int:
        return self.pool.lease_bytes // PAGE

    def cache_tokens(self, tokens: int) -> None:
        assert self.pool.ensure(tokens)
        self.cache += np.split(self.pool.alloc(tokens), range(1, tokens))

    def evict(self, tokens: int, _: object = None) -> bool:
        evicted, self.cache = self.cache[:tokens], self.cache[tokens:]
        if evicted:
            self.pool.free(np.concatenate(evicted))
        return bool(evicted)

    def step(self) -> None:
        self.lease.before_step(self)
        while self.waiting_queue:
            need = len(self.waiting_queue[0].origin_input_ids)
            promised = need + self.waiting_queue[0].sampling_params.max_new_tokens
            kept = sum(r.sampling_params.max_new_tokens for r in self.running_batch.reqs)
            if promised + kept >= self.lease.available_tokens() + self.tree_cache.evictable_size():
                return
            if need > self.lease.available_tokens():
                self.evict(need - self.lease.available_tokens())
            self.slots.append(self.pool.alloc(need))
            self.running_batch.reqs.append(self.waiting_queue.pop(0))

    def finish(self) -> None:
        """The first running request ends; what it had is cached."""
        self.running_batch.reqs.pop(0)
        self.cache += np.split(done := self.slots.pop(0), range(1, len(done)))


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> memory.Device:
    monkeypatch.setattr(kv_lease, "evict", Engine.evict)
    return memory.open_device("host:0", PAGES * PAGE, account_dir=tmp_path, page_bytes=PAGE)


def test_a_busy_engine_with_a_queue_gets_what_an_idle_one_caches(device: memory.Device) -> None:
    idle, busy = Engine(device, "idle"), Engine(device, "busy")
    idle.cache_tokens(10 * BLOCK)
    busy.waiting_queue = [request(2 * BLOCK, BLOCK) for _ in range(3)]
    busy.step()
    assert len(busy.running_batch.reqs) == 1 and busy.owner.wished_bytes > 0
    idle.lease.rest(idle)
    assert idle.lease_pages < 11
    busy.step()
    assert len(busy.running_batch.reqs) == 3 and busy.owner.wished_bytes == 0
    kept = idle.lease_pages
    idle.lease.rest(idle)
    assert idle.lease_pages == kept > 1, "no more than was missing"


def test_what_runs_keeps_its_pages_and_its_next_steps(device: memory.Device) -> None:
    first, second = Engine(device, "first"), Engine(device, "second")
    first.waiting_queue = [request(5 * BLOCK, BLOCK)]
    first.step()
    first.cache_tokens(3 * BLOCK)
    used = first.pool.used()
    second.waiting_queue = [request(PAGES * BLOCK // 2 + BLOCK, BLOCK)]
    second.step()
    assert second.owner.wished_bytes > 0
    first.step()
    assert first.cache == [] and first.pool.used() == used - 3 * BLOCK and first.lease.available_tokens() >= 16
    second.step()
    assert not second.running_batch.reqs, "it needs what the other runs with"
    first.finish()
    first.lease.rest(first)
    second.step()
    assert second.running_batch.reqs and second.owner.wished_bytes == 0


def test_the_rest_of_a_chunked_prompt_is_kept_under_pressure(device: memory.Device) -> None:
    engine, other = Engine(device, "engine"), Engine(device, "other")
    engine.chunked_req = request(6 * BLOCK, 10)
    engine.step()
    assert engine.lease.available_tokens() >= 6 * BLOCK
    other.waiting_queue = [request(12 * BLOCK, BLOCK)]
    other.step()
    assert engine.pool.pressure() > 0
    engine.step()
    assert engine.lease.available_tokens() >= 6 * BLOCK


def test_one_of_many_waiting_requests_is_let_in_when_not_all_fit(device: memory.Device) -> None:
    engine = Engine(device, "engine")
    engine.waiting_queue = [request(4 * BLOCK, BLOCK) for _ in range(10)]
    engine.step()
    assert len(engine.running_batch.reqs) == 3
    assert engine.owner.wished_bytes == 0, "nobody could give anything"


def test_a_request_nearly_as_large_as_the_engine_is_let_in_though_it_has_to_share_blocks(device: memory.Device) -> None:
    engine = Engine(device, "large", SMALL_BLOCK)
    engine.cache_tokens(1)
    engine.waiting_queue = [request(PAGES * SMALL_BLOCK - 22, 10)]
    engine.step()
    assert len(engine.running_batch.reqs) == 1


@pytest.mark.parametrize("engines", [2, 3])
def test_busy_engines_that_wish_all_get_their_turn(device: memory.Device, engines: int) -> None:
    """Each needs most of the device for one request, again and again."""
    all_engines = [Engine(device, f"e{i}") for i in range(engines)]
    done = 0
    for _ in range(4):
        for engine in all_engines:
            engine.waiting_queue.append(request(9 * BLOCK, 2 * BLOCK))
    for _ in range(200):
        for engine in all_engines:
            engine.step()
            engine.pool.check()
            if engine.running_batch.reqs:
                engine.finish()
                done += 1
            if not engine.waiting_queue:
                engine.lease.rest(engine)
    assert done == 4 * engines and device.wanted_bytes() == 0


@pytest.mark.parametrize("late", [0, 1])
def test_an_engine_with_a_queue_without_end_starves_nobody(device: memory.Device, late: int) -> None:
    """Also if the other gives all back at each turn, so that both hold alike."""
    engines = [Engine(device, f"e{i}") for i in range(2)]
    for turn in range(100):
        for i, engine in enumerate(engines):
            if i != late and len(engine.waiting_queue) < 2:
                engine.waiting_queue.append(request(9 * BLOCK, 2 * BLOCK))
            if i == late and turn == 20:
                engine.waiting_queue.append(request(9 * BLOCK, 2 * BLOCK))
            engine.step()
            if engine.running_batch.reqs:
                engine.finish()
            if not engine.waiting_queue:
                engine.lease.rest(engine)
    assert not engines[late].waiting_queue and not engines[late].running_batch.reqs


def test_admission_that_was_closed_stays_so_only_while_something_runs(device: memory.Device) -> None:
    engine = Engine(device, "engine")
    engine.waiting_queue = [request(BLOCK, BLOCK)]
    for _ in range(3):
        engine.step()
    engine.running_batch.batch_is_full = True
    engine.step()
    assert engine.running_batch.batch_is_full, "what runs will end, and open it"
    engine.finish()
    engine.step()
    assert not engine.running_batch.batch_is_full, "no memory came, and nothing will end"


def test_a_wish_goes_when_the_model_does_or_its_queue_is_empty(device: memory.Device) -> None:
    idle, busy = Engine(device, "idle"), Engine(device, "busy")
    idle.cache_tokens(10 * BLOCK)
    busy.waiting_queue = [request(6 * BLOCK, BLOCK)]
    for end in (busy.lease.withdraw_wish, lambda: busy.lease.rest(busy), busy.owner.close):
        busy.step()
        assert device.wanted_bytes() > 0
        end()
        assert device.wanted_bytes() == 0


def test_what_neighbours_kv_is_not_enough_for_is_no_wish_and_is_told(device: memory.Device) -> None:
    """Only a model that leaves would help."""
    idle = device.register("idle")
    idle.reserve((PAGES - 4) * PAGE, "weights")
    busy = Engine(device, "busy")
    busy.waiting_queue = [request(6 * BLOCK, BLOCK)]
    busy.step()
    assert device.wanted_bytes() == 0 and busy.lease.lacks_bytes >= 3 * PAGE
    busy.waiting_queue = []
    busy.lease.rest(busy)
    assert busy.lease.lacks_bytes == 0


def eventually(condition: Callable[[], bool]) -> None:
    """The helper thread maps and unmaps in its own time."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it never happened")


def test_pages_of_the_next_steps_are_mapped_before_these(device: memory.Device) -> None:
    engine = Engine(device, "engine")
    engine.waiting_queue = [request(2 * BLOCK, 2 * BLOCK)]
    engine.step()
    engine.step()
    eventually(lambda: engine.pool.stats()["ahead_bytes"] >= PAGE)
    assert engine.pool.stats()["mapped_bytes"] <= engine.pool.lease_bytes == engine.owner.leased_bytes
    engine.pool.check()


def test_an_idle_engine_keeps_nothing_mapped_ahead(device: memory.Device) -> None:
    engine = Engine(device, "engine")
    engine.waiting_queue = [request(2 * BLOCK, 4 * BLOCK) for _ in range(2)]
    engine.step()
    engine.step()
    eventually(lambda: engine.pool.stats()["ahead_bytes"] >= PAGE)
    engine.finish()
    engine.finish()
    engine.lease.rest(engine)
    eventually(lambda: engine.pool.stats()["ahead_bytes"] == 0)
    engine.pool.quiesce()
    assert engine.lease_pages == 5, "the cache of two prompts, and the padding slot"
    assert engine.pool.stats()["mapped_bytes"] == engine.owner.leased_bytes == 5 * PAGE
    assert engine.owner.spare_bytes == 0


def test_what_is_mapped_ahead_goes_before_the_cache_when_others_wish(device: memory.Device) -> None:
    first, second = Engine(device, "first"), Engine(device, "second")
    first.cache_tokens(3 * BLOCK)
    first.waiting_queue = [request(BLOCK, 6 * BLOCK)]
    first.step()
    first.step()
    eventually(lambda: first.pool.stats()["ahead_bytes"] >= PAGE)
    lease = first.lease_pages
    others = device.register("others")
    others.reserve(device.free_bytes(), "weights")
    second.waiting_queue = [request(2 * BLOCK, BLOCK)]
    second.step()
    assert second.owner.wished_bytes > 0
    first.step()
    assert len(first.cache) == 3 * BLOCK and first.lease_pages < lease
    second.step()
    assert second.running_batch.reqs
    first.pool.quiesce()
    assert first.pool.stats()["mapped_bytes"] <= first.owner.leased_bytes
    assert not device.audit().problems


def test_demand_counts_what_runs_first_and_places_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler: Any = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[request(10, 100, output=60)]),
        last_batch=None,
        chunked_req=None,
        max_running_requests=3,
        waiting_queue=[request(10, 5), request(20, 5), request(30, 5)],
        new_token_ratio_tracker=SimpleNamespace(current=0.51),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )
    assert demand_tokens(scheduler, 1) == GroupDemand(16, [21 - 16 + 17, 21 - 16 + 17 + 27], alone=17)
    assert demand_tokens(scheduler, 1).step == 1
    monkeypatch.setattr(kv_demand, "reserve_tokens", lambda _: 12)
    guessing = demand_tokens(scheduler, 1)
    assert guessing == GroupDemand(16 + 12, [17 + 12, 17 + 12 + 27 + 12], 12, 17 + 12), "two steps' guesses for each"
    assert guessing.step == 12
    scheduler.max_running_requests = 1
    assert demand_tokens(scheduler, 1).admissions == []
