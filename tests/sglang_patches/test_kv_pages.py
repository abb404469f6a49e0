"""Slots of several tokens: SGLang's allocator of pages on an elastic pool, against SGLang's own way of filling
pages."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism import memory
from prism.engine import boot, cuda_stub

pytestmark = pytest.mark.engine
PAGE_BYTES, PAGES, TOKENS = 65536, 32, 16
"""Tokens of a slot; eight of them (own blocks) or 128 (shared ones) are in a page of memory."""


def classes() -> Any:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang_patches import kv_allocator
    return kv_allocator


@pytest.fixture(params=[8, 128], ids=["own blocks", "shared blocks"])
def allocator(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    device = memory.open_device("host:0", PAGES * PAGE_BYTES, account_dir=tmp_path, page_bytes=PAGE_BYTES)
    owner = device.register("a")
    row = PAGE_BYTES // request.param // TOKENS // 4
    layout = memory.KvLayout(layers=1, kv_heads=1, head_dim=row, dtype_bytes=2, tokens_per_slot=TOKENS)
    size = (PAGES - 1) * request.param * TOKENS
    pool = owner.arena(4 * PAGES * PAGE_BYTES).divide(layout, max_tokens=size, lease_bytes=PAGES * PAGE_BYTES)
    group = memory.KvGroup(memory.GroupKind.TOKENS, pool, size)
    seat = SimpleNamespace(owner=owner, world=1)
    kvcache = SimpleNamespace(prism_group=group, prism_seat=seat)
    return classes().ElasticPagedAllocator(size, TOKENS, None, "cpu", kvcache, False)


def extend(allocator: Any, before: list[int], after: list[int], last: list[int]) -> list[list[int]]:
    """The slots of each sequence."""
    import torch

    lens, ends = torch.tensor(before), torch.tensor(after)
    count = int((ends - lens).sum())
    found = allocator.alloc_extend(lens, lens, ends, ends, torch.tensor(last), count)
    assert len(found) == count
    return [part.tolist() for part in torch.split(found, (ends - lens).tolist())]


def fits(slots: list[int], before: int = 0) -> bool:
    """Token ``i`` of a sequence lies at ``i`` within its page, and neighbours in a page are neighbours in memory."""
    places = [slot % TOKENS == (before + i) % TOKENS for i, slot in enumerate(slots)]
    steps = [b == a + 1 for a, b in pairwise(slots) if b % TOKENS]
    return all(places) and all(steps)


def test_prompts_and_steps_fill_pages_in_order(allocator: Any) -> None:
    import torch

    lengths = [5, 16, 40]
    sequences = extend(allocator, [0, 0, 0], lengths, [-1, -1, -1])
    assert all(fits(s) for s in sequences) and [len(s) for s in sequences] == lengths
    for step in range(1, 30):
        ends = torch.tensor([length + step for length in lengths])
        more = allocator.alloc_decode(ends, ends, torch.tensor([s[-1] for s in sequences]))
        for sequence, slot in zip(sequences, more.tolist(), strict=True):
            sequence.append(slot)
    assert all(fits(s) for s in sequences)
    used = [slot for s in sequences for slot in s]
    assert len(set(used)) == len(used) and min(used) >= TOKENS, "the first page is padding"
    assert allocator.group.pool.used() == sum(-(-len(s) // TOKENS) for s in sequences)
    allocator.group.pool.check()


def test_a_cached_prefix_goes_on_in_its_page_and_in_new_ones(allocator: Any) -> None:
    (first,) = extend(allocator, [0], [20], [-1])
    rest, fresh = extend(allocator, [20, 0], [50, 3], [first[-1], -1])
    assert fits(first + rest) and rest[0] == first[-1] + 1 and fits(fresh)


def test_pages_are_freed_whole_and_all_or_nothing_is_handed_out(allocator: Any) -> None:
    import torch

    most = allocator.available_size()
    (sequence,) = extend(allocator, [0], [most - 5], [-1])
    ends = torch.tensor([2 * TOKENS])
    assert allocator.alloc_extend(0 * ends, 0 * ends, ends, ends, torch.tensor([-1]), 2 * TOKENS) is None
    assert allocator.unleased_size() == allocator.size - most
    allocator.free(torch.tensor(sequence))
    assert allocator.available_size() == most and allocator.group.pool.used() == 0
    allocator.free_group_begin()
    slots = allocator.alloc(3 * TOKENS)
    allocator.free(slots)
    assert allocator.group.pool.used() == 3
    allocator.free_group_end()
    assert allocator.group.pool.used() == 0
