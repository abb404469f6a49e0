"""Slots that are freed while the device computes: never read there at once, never lost, never given back twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prism import memory
from sglang_patches import kv_lease, kv_returns
from sglang_patches.kv_returns import SlotReturns
from tests.sglang_patches.test_kv_lease import BLOCK, PAGE, PAGES, Engine, request


class Arrival:
    """The event behind a copy, passed at the test's word."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class OnDevice:
    """Slots on a device that computes: reading them there would wait for it."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def to(self, *_: Any) -> torch.Tensor:
        raise AssertionError("this waits for the device")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    begun: list[Arrival] = []

    def begin_copy(tensor: OnDevice) -> tuple[torch.Tensor, Arrival]:
        begun.append(Arrival())
        return tensor.slots, begun[-1]

    monkeypatch.setattr(kv_returns, "begin_copy", begin_copy)
    monkeypatch.setattr(kv_lease, "evict", Engine.evict)
    return begun


@pytest.fixture
def device(tmp_path: Path) -> memory.Device:
    return memory.open_device("host:0", PAGES * PAGE, account_dir=tmp_path, page_bytes=PAGE)


def engine_with_returns(device: memory.Device, name: str) -> tuple[Engine, SlotReturns]:
    engine = Engine(device, name)
    return engine, engine.lease.parts[0].returns


def test_slots_freed_behind_a_step_come_when_their_numbers_have_arrived(
    device: memory.Device, copies: list[Arrival]
) -> None:
    engine, returns = engine_with_returns(device, "engine")
    engine.step()
    assert engine.pool.ensure(40)
    first, second = torch.from_numpy(engine.pool.alloc(20)), torch.from_numpy(engine.pool.alloc(20))
    engine.lease.planned(ahead=True)
    returns.free(OnDevice(first))  # type: ignore[arg-type]
    returns.free(OnDevice(second))  # type: ignore[arg-type]
    assert engine.pool.used() == 40 and returns.coming == 40
    engine.step()
    assert engine.pool.used() == 40, "nothing has arrived, and there is memory enough"
    copies[0].passed = True
    engine.step()
    assert engine.pool.used() == 20 and returns.coming == 20
    engine.lease.rest(engine)
    assert engine.pool.used() == 0 and returns.coming == 0


def test_without_a_step_ahead_slots_are_free_at_once(device: memory.Device) -> None:
    engine, returns = engine_with_returns(device, "engine")
    engine.step()
    assert engine.pool.ensure(20)
    engine.lease.planned(ahead=False)
    returns.free(torch.from_numpy(engine.pool.alloc(20)))
    assert engine.pool.used() == 0


def test_who_lacks_memory_waits_for_what_is_on_its_way(device: memory.Device, copies: list[Arrival]) -> None:
    engine, returns = engine_with_returns(device, "engine")
    tokens = (PAGES - 2) * BLOCK
    assert engine.pool.ensure(tokens)
    slots = torch.from_numpy(engine.pool.alloc(tokens))
    engine.lease.planned(ahead=True)
    returns.free(OnDevice(slots))  # type: ignore[arg-type]
    engine.waiting_queue = [request(8 * BLOCK, BLOCK)]
    engine.step()
    assert engine.running_batch.reqs and copies[0].passed
    assert engine.owner.wished_bytes == 0


def test_what_waits_for_its_fence_is_not_given_up_again(device: memory.Device, copies: list[Arrival]) -> None:
    """Memory that goes back as soon as the device is done is not taken from cached prefixes, too."""
    idle, busy = Engine(device, "idle"), Engine(device, "busy")
    idle.cache_tokens(12 * BLOCK)
    fence = memory.Fence()
    idle.pool.fence_with(fence)
    idle.evict(6 * BLOCK)
    kept = len(idle.cache)
    busy.waiting_queue = [request(5 * BLOCK, BLOCK)]
    busy.step()
    assert idle.pool.pressure() > 0
    for _ in range(3):
        idle.step()
    assert len(idle.cache) == kept and not busy.running_batch.reqs
    fence.signal()
    idle.pool.quiesce()
    busy.step()
    assert busy.running_batch.reqs and len(idle.cache) == kept
