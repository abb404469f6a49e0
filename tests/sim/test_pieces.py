"""Long comparisons in pieces, on draws of one split."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from benchmarks.sim import splits
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.splits import RECORDED, Split, draws, split_of


class Counting:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> dict[str, Any]:
        self.runs += 1
        return {"run": self.runs}


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    work, again = Counting(), Pieces(tmp_path)
    assert [name for name, _ in Pieces(tmp_path).do([("a b/c", work), ("d", work)])] == ["a b/c", "d"]
    assert list(again.do([("a b/c", work), ("d", work)])) == []
    assert work.runs == 2
    assert (again.get("a b/c"), again.get("d"), again.get("e")) == ({"run": 1}, {"run": 2}, None)
    assert again.kept("d", work) == {"run": 2}


def test_a_piece_under_way_elsewhere_is_left_to_whom_it_belongs(tmp_path: Path) -> None:
    """And a claim whose process is gone is none."""
    work, pieces = Counting(), Pieces(tmp_path)
    with (tmp_path / "a.claim").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert [name for name, _ in pieces.do([("a", work), ("b", work)])] == ["b"]
    assert [name for name, _ in pieces.do([("a", work), ("b", work)])] == ["a"]


def test_nothing_is_begun_after_the_end(tmp_path: Path) -> None:
    work = Counting()
    assert list(Pieces(tmp_path).do([("a", work)], until_s=0.0)) == []
    assert not work.runs


def test_no_draw_is_for_both() -> None:
    tuning, judging = draws(Split.TUNING, 50), draws(Split.JUDGING, 50)
    assert len(tuning) == len(judging) == 50
    assert not set(tuning) & set(judging)
    assert {split_of(draw) for draw in tuning} == {Split.TUNING}
    assert {split_of(draw) for draw in judging} == {Split.JUDGING}
    assert not set(RECORDED[Split.TUNING]) & set(RECORDED[Split.JUDGING])


def test_a_draw_that_was_looked_into_is_used_up(monkeypatch: Any) -> None:
    first = draws(Split.JUDGING, 2)
    monkeypatch.setattr(splits, "SPENT", frozenset(first[:1]))
    assert first[0] not in draws(Split.JUDGING, 50)
    assert draws(Split.JUDGING, 2, 901) == (901, 902), "a comparison may have fresh ones reserved for it"
    assert split_of(first[0]) is Split.TUNING
