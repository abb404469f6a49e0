"""Copies keep to a declared rate, all together and however small they are."""

from __future__ import annotations

import pytest

from prism.kv.pacing import LinkPace


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
