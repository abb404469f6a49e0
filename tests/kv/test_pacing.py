"""Copies keep to a declared rate, all together and however small they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.kv.pacing import LenderPace, LinkPace


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("size", [100, 1_000_000, 50_000_000])
@pytest.mark.parametrize("copying_s", [0.0, 1e-5])
def test_a_run_of_copies_takes_what_the_link_would(size: int, copying_s: float) -> None:
    time = FakeTime()
    pace = LinkPace(1e9, time.clock, time.nap)
    for _ in range(100):
        began_s = pace.begin()
        time.now_s += copying_s
        pace.copied(size, began_s)
    expected_s = max(100 * size / 1e9, 100 * copying_s)
    assert expected_s - 3e-4 <= time.now_s - 100.0 <= expected_s + 3e-4


def test_rests_are_not_saved_up() -> None:
    time = FakeTime()
    pace = LinkPace(1e6, time.clock, time.nap)
    for _ in range(2):
        time.now_s += 50.0
        before_s = time.now_s
        pace.copied(1_000_000, pace.begin())
        assert time.now_s - before_s == pytest.approx(1.0)


def test_without_a_rate_nothing_waits() -> None:
    pace = LinkPace(0.0, nap=lambda seconds: pytest.fail("waited"))
    pace.copied(1 << 40, pace.begin())


def test_all_who_borrow_share_what_the_lender_gives(tmp_path: Path) -> None:
    time = FakeTime()
    one, two = (LenderPace(1e9, 1e6, tmp_path / "host-1.pace", time.clock, time.nap) for _ in range(2))
    for pace in (one, two, one, two):
        pace.copied(1_000_000, pace.begin())
    assert time.now_s == pytest.approx(104.0)
    began_s = time.now_s
    assert one.book(1_000_000, began_s) == pytest.approx(105.0)
    assert two.book(1_000_000, began_s) == pytest.approx(106.0), "two at a time are half as fast"
    free = LenderPace(1e6, 0.0, tmp_path / "other.pace", time.clock, time.nap)
    assert free.book(1_000_000, began_s) == pytest.approx(105.0) and not (tmp_path / "other.pace").exists()


def test_what_a_machine_booked_before_it_was_started_again_holds_nobody_up(tmp_path: Path) -> None:
    time = FakeTime()
    LenderPace(0.0, 1.0, tmp_path / "a.pace", time.clock, time.nap).book(1_000_000, time.now_s)
    time.now_s = 5.0
    assert LenderPace(0.0, 1e6, tmp_path / "a.pace", time.clock, time.nap).book(1_000_000, 5.0) == pytest.approx(6.0)
