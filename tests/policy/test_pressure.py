"""A device's books count whole pages, as its account does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.policy.pressure import PressureBoard, Shard

DEVICE = DeviceSpec(DeviceId("n/host:0"), NodeId("n"), DeviceKind.HOST, 400)
shards = st.builds(Shard, st.just(1.0), st.integers(0, 200), st.integers(0, 50))


@given(shards, st.lists(st.sampled_from([0, 1, 7, 20]), min_size=1, max_size=4), st.sampled_from([1, 20, 32]))
def test_one_device_and_all_devices_agree(shard: Shard, pages: list[int], weight_page: int) -> None:
    specs = [replace(DEVICE, id=DeviceId(f"d{i}"), page_bytes=p) for i, p in enumerate(pages)]
    board = PressureBoard([replace(s, weight_page_bytes=weight_page) for s in specs])
    on_each = np.broadcast_to(board.need(shard), len(pages))
    for index, page in enumerate(pages):
        need_bytes = board.need_on(index, shard)
        assert need_bytes == on_each[index]
        assert board.weights_bytes(index, shard) % weight_page == 0
        assert board.kv_bytes(index, shard) >= max(page, shard.min_kv_bytes)
        before = board.shared.copy(), board.promised_kv.copy()
        board.charge(index, shard)
        assert before[0][index] - board.shared[index] + board.promised_kv[index] - before[1][index] == need_bytes
        board.release(index, shard)
        assert (board.shared == before[0]).all() and (board.promised_kv == before[1]).all()


def test_what_fits_byte_by_byte_need_not_fit_page_by_page() -> None:
    """Two models of 15.1 pages' tenths and one of 7.5: 37.7 of 40 in bytes, 46 in pages of 2."""
    exact, paged = PressureBoard([DEVICE]), PressureBoard([replace(DEVICE, page_bytes=20, weight_page_bytes=20)])
    for board, fits in ((exact, True), (paged, False)):
        for _ in range(2):
            board.charge(0, Shard(1.0, 151, 1))
        assert bool(board.fits(Shard(1.0, 75, 1))[0]) is fits


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), st.booleans()), min_size=1, max_size=12))
def test_the_order_of_devices_is_that_of_one_search_after_the_other(devices: list[tuple[float, int, bool]]) -> None:
    """Equal loads, and equal loads with equal memory left, included."""
    board = PressureBoard([replace(DEVICE, id=DeviceId(f"d{i}")) for i in range(len(devices))])
    for index, (_, weights, _) in enumerate(devices):
        board.charge(index, Shard(0.0, weights, 0))
    loads, allowed = np.array([load for load, _, _ in devices]), np.array([ok for _, _, ok in devices])
    order, left = board.in_order(loads, allowed), allowed.copy()
    for index in order:
        assert board.best_by(loads, 1, left) == [index]
        left[index] = False
    assert not left.any()
