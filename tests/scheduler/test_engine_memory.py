"""What engines and strangers take of a GPU counts when models are placed."""

from __future__ import annotations

import numpy as np

from prism.core.events import DeviceReport
from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.policy.pressure import PressureBoard, Shard
from prism.scheduler.fleet import Fleet

GIB = 1 << 30
PAGE = 2 << 20
SHARD = Shard(0.1, 16 * GIB, GIB)


def spec(index: int, engine_bytes: int) -> DeviceSpec:
    id = DeviceId(f"n/cuda:{index}")
    return DeviceSpec(id, NodeId("n"), DeviceKind.CUDA, 80 * GIB, "", PAGE, PAGE, 8, engine_bytes)


def report(device: DeviceId, capacity_bytes: int) -> DeviceReport:
    return DeviceReport(device, capacity_bytes, capacity_bytes, ())


def test_an_engine_costs_more_than_weights_and_kv() -> None:
    board = PressureBoard([spec(0, 0), spec(1, 2 * GIB)])
    assert list(np.broadcast_to(board.need(SHARD), 2)) == [17 * GIB, 19 * GIB]
    assert [board.need_on(i, SHARD) for i in (0, 1)] == [17 * GIB, 19 * GIB]
    for _ in range(4):
        board.charge(1, SHARD)
    assert board.shared[1] == 80 * GIB - 4 * 18 * GIB
    assert list(board.fits(SHARD)) == [True, False]
    for _ in range(4):
        board.release(1, SHARD)
    assert board.shared[1] == 80 * GIB


def test_a_device_of_which_strangers_take_memory_is_smaller_until_they_give_it_back() -> None:
    fleet, id = Fleet(), DeviceId("n/cuda:0")
    fleet.add_devices([spec(0, 2 * GIB)])
    assert list(fleet.fits_now(SHARD)) == [True]
    fleet.take_report(report(id, 18 * GIB), 1.0)
    assert list(fleet.fits_now(SHARD)) == [False] and fleet.devices[id].spec.memory_bytes == 18 * GIB
    fleet.take_report(report(id, 10 * GIB), 2.0)
    assert fleet.room_on(0) == 10 * GIB
    fleet.take_report(report(id, 80 * GIB - 1), 3.0)
    assert list(fleet.fits_now(SHARD)) == [True]
    capacity = fleet.devices[id].spec.memory_bytes
    fleet.take_report(report(id, capacity - PAGE + 1), 4.0)
    assert fleet.devices[id].spec.memory_bytes == capacity, "less than a page is no change"


def test_a_device_that_becomes_smaller_than_what_is_on_it_keeps_it() -> None:
    """Nobody is driven out by it: the engines give KV back themselves, and nothing more is placed."""
    fleet, id = Fleet(), DeviceId("n/cuda:0")
    fleet.add_devices([spec(0, 0)])
    fleet.board.charge(0, SHARD)
    fleet.take_report(report(id, 10 * GIB), 1.0)
    assert fleet.room_on(0) == 10 * GIB - 17 * GIB and not fleet.fits_now(Shard(0.0, 0, 0)).any()
    fleet.take_report(report(id, 80 * GIB), 2.0)
    assert fleet.room_on(0) == 63 * GIB
