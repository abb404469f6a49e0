"""Engines of one paced device take turns; those of another are not held up."""

from __future__ import annotations

from pathlib import Path

from prism.core.pace import DevicePace, LayerWork
from prism.engine.device_clock import DeviceClock, clock_file

PACE = DevicePace(layer_s=1.0)


class Hand:
    """Time by hand."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.now_s += seconds


def clock(folder: Path, device: str, hand: Hand) -> DeviceClock:
    return DeviceClock(PACE, clock_file(folder, device), hand, hand.nap)


def test_a_step_takes_the_declared_time(tmp_path: Path) -> None:
    hand = Hand()
    mine = clock(tmp_path, "host:0", hand)
    done_s = mine.begin(LayerWork(layers=3))
    hand.now_s += 0.5  # real compute
    mine.end(done_s)
    assert hand.now_s == 103.0
    assert (mine.paced_s, mine.overrun_s) == (3.0, 0.0)
    mine.close()


def test_two_engines_of_a_device_take_turns(tmp_path: Path) -> None:
    one, two = Hand(), Hand(100.5)
    first, second = clock(tmp_path, "host:0", one), clock(tmp_path, "host:0", two)
    done_s, later_s = first.begin(LayerWork(layers=2)), second.begin(LayerWork(layers=2))
    assert (done_s, later_s) == (102.0, 104.0)
    assert first.begin(LayerWork(layers=1)) == 105.0
    first.close()
    second.close()


def test_another_device_is_not_held_up(tmp_path: Path) -> None:
    hand = Hand()
    first, second = clock(tmp_path, "host:0", hand), clock(tmp_path, "host:1", hand)
    first.begin(LayerWork(layers=50))
    assert second.begin(LayerWork(layers=1)) == 101.0
    first.close()
    second.close()


def test_real_compute_that_takes_longer_is_said(tmp_path: Path) -> None:
    hand = Hand()
    mine = clock(tmp_path, "host:0", hand)
    done_s = mine.begin(LayerWork(layers=1))
    hand.now_s += 1.25
    mine.end(done_s)
    assert (hand.now_s, mine.overrun_s) == (101.25, 0.25)
    mine.close()


def test_a_clock_of_an_earlier_boot_is_begun_anew(tmp_path: Path) -> None:
    before = clock(tmp_path, "host:0", Hand(1e6))
    before.begin(LayerWork(layers=1))
    before.close()
    mine = clock(tmp_path, "host:0", Hand())
    assert mine.begin(LayerWork(layers=1)) == 101.0
    mine.close()
