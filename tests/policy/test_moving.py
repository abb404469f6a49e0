"""Move or recompute at its border; what a full pool drops."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.moving import Leg, StoredPiece, Way, choose_dropped, choose_way

GB = 1e9
ROOT = Path(__file__).parents[2]


def test_the_border_between_moving_and_computing_again() -> None:
    """1000 tokens at 500 tokens/s take 2 s; 1 GB out and in at 1 GB/s takes as long."""
    both = (Leg(10**9, GB), Leg(10**9, GB))
    at = choose_way(both, 1000, 500.0)
    assert (at.way, at.move_s, at.recompute_s) == (Way.RECOMPUTE, 2.0, 2.0)
    assert choose_way(both, 1001, 500.0).way is Way.MOVE
    assert choose_way((both[0], replace(both[1], nbytes=10**9 - 1)), 1000, 500.0).way is Way.MOVE
    assert choose_way((both[0], replace(both[1], fixed_s=1e-6)), 1000, 500.0).way is Way.RECOMPUTE
    assert choose_way(both[:1], 1000, 500.0).way is Way.MOVE


def test_what_is_not_known_or_does_not_move() -> None:
    assert choose_way((Leg(1, 0.0),), 10, 100.0).way is Way.RECOMPUTE
    assert choose_way((Leg(1, GB),), 10, 0.0).way is Way.MOVE
    assert choose_way((Leg(1, 0.0),), 10, 0.0) == (choose_way((Leg(2, 0.0),), 10, 0.0))
    assert choose_way((), 0, 0.0).way is Way.RECOMPUTE


rates = st.floats(1.0, 1e12)


@given(nbytes=st.integers(0, 1 << 40), tokens=st.integers(0, 1 << 20), link=rates, prefill=rates)
def test_the_choice_is_never_the_slower_way(nbytes: int, tokens: int, link: float, prefill: float) -> None:
    choice = choose_way((Leg(nbytes, link),), tokens, prefill)
    taken_s = choice.move_s if choice.way is Way.MOVE else choice.recompute_s
    assert taken_s == min(nbytes / link, tokens / prefill)


def piece(
    name: str, used_s: float = 0.0, recompute_s: float = 1.0, position: int = 0, nbytes: int = 100
) -> StoredPiece:
    return StoredPiece(name, nbytes, used_s, recompute_s, position)


def test_least_recently_used_and_cheapest_go_first_and_tails_before_heads() -> None:
    pieces = [piece("old"), piece("new", used_s=90.0), piece("dear", recompute_s=20.0), piece("tail", position=3)]
    assert choose_dropped(pieces, 1, 100.0) == ["tail"]
    assert choose_dropped(pieces, 101, 100.0) == ["tail", "old"]
    assert choose_dropped(pieces, 201, 100.0) == ["tail", "old", "new"]
    assert choose_dropped(pieces, 0, 100.0) == []
    assert set(choose_dropped(pieces, 1000, 100.0)) == {"old", "new", "dear", "tail"}


def test_large_pieces_must_save_more() -> None:
    assert choose_dropped([piece("small"), piece("large", nbytes=200)], 1, 10.0) == ["large"]


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(0, 3000))
def test_no_more_is_dropped_than_needed(sizes: list[int], needed: int) -> None:
    pieces = [piece(str(i), nbytes=size) for i, size in enumerate(sizes)]
    dropped = choose_dropped(pieces, needed, 1.0)
    freed = sum(sizes[int(name)] for name in dropped)
    assert freed >= min(needed, sum(sizes))
    assert not dropped or freed - sizes[int(dropped[-1])] < needed


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_link_without_a_rate_takes_for_ever(rate: float) -> None:
    assert Leg(1, rate).estimated_s == math.inf


def test_whatever_stores_or_brings_kv_has_asked() -> None:
    """One function chooses; nothing of an engine's KV is kept or fetched without it. (What was lent and is wanted back
    goes to host memory without a question: it is stored, and its owner may be the only one who has it.)"""
    asks = {"keep": "keep_is_worth", "keep_soon": "keep_is_worth", "fetch": "reach"}
    files = [file for package in ("prism", "sglang_patches") for file in (ROOT / package).rglob("*.py")]
    callers = [file for file in files if "choose_way(" in file.read_text()]
    named = {str(file.relative_to(ROOT)) for file in callers} - {"prism/policy/moving.py"}
    modelled = {"prism/sim/live_server.py", "prism/sim/pairs.py"}
    assert named - modelled == {"prism/kv/keeper.py", "prism/kv/exchange.py", "sglang_patches/remote_taking.py"}
    found = set[str]()
    for file in (ROOT / "sglang_patches").glob("kv_move*.py"):
        text = file.read_text()
        for call, question in asks.items():
            if f"store.{call}(" in text:
                found.add(call)
                assert f"store.{question}(" in text, f"{file.name} has {call} without {question}"
    assert found == asks.keys()
