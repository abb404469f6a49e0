"""What a peer is asked is looked at whole before anything is touched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prism.remote.messages import RunPieces
from sglang_patches.remote_check import BadMessage, check_work

HELD = frozenset({0, 1, 2, 3})
ROWS, WIDTH, SLOTS, VOCAB = 8, 16, 100, 50
DECODE = RunPieces(
    batch=1,
    first=1,
    end=3,
    decode=True,
    rows=[0, 7],
    seq_lens=[5, 16],
    out_slots=[99, 1],
    positions=[4, 15],
    token_ids=[0, 49],
    table_rows=[0, 7],
    table_positions=[4, 15],
    table_slots=[99, 1],
)
PREFILL = RunPieces(
    batch=1,
    first=0,
    end=4,
    decode=False,
    rows=[1, 2],
    seq_lens=[3, 2],
    out_slots=[5, 6, 7],
    positions=[2, 0, 1],
    token_ids=[3, 4, 5],
    prefix_lens=[2, 0],
    extend_lens=[1, 2],
    table_rows=[1, 2, 2],
    table_positions=[2, 0, 1],
    table_slots=[5, 6, 7],
)

AHEAD = msgspec.structs.replace(PREFILL, first=2, since=1, prefix_lens=[0, 0], extend_lens=[1, 2], seq_lens=[1, 2])
"""Its leader has run piece 1 in the peer's stead."""


THREE = [[0, 1, 2], [0, 15, 0], [2, 2, 2]]


def check(work: RunPieces, mrope: bool = False) -> None:
    check_work(work, HELD, ROWS, WIDTH, SLOTS, VOCAB, mrope)


def test_positions_of_three_parts_are_let_through_where_the_model_has_them() -> None:
    check(msgspec.structs.replace(PREFILL, mrope=THREE), mrope=True)


@pytest.mark.parametrize(
    ("mrope", "parts"),
    [(False, THREE), (True, []), (True, THREE[:2]), (True, [*THREE[:2], [0, 1]]), (True, [*THREE[:2], [0, 1, WIDTH]])],
)
def test_positions_of_other_parts_than_the_model_has_are_not(mrope: bool, parts: list[list[int]]) -> None:
    with pytest.raises(BadMessage, match=r"positions|mrope"):
        check(msgspec.structs.replace(PREFILL, mrope=parts), mrope)


@pytest.mark.parametrize("work", [DECODE, PREFILL, AHEAD], ids=["decode", "prefill", "ahead"])
def test_what_can_be_is_let_through(work: RunPieces) -> None:
    check(work)


@pytest.mark.parametrize(
    ("work", "changes"),
    [
        (DECODE, {"first": 3}),
        (DECODE, {"first": -1}),
        (DECODE, {"end": 5}),
        (DECODE, {"end": 1 << 60}),
        (DECODE, {"rows": [0, 8]}),
        (DECODE, {"rows": [0, 0]}),
        (DECODE, {"rows": [-1, 0]}),
        (DECODE, {"rows": []}),
        (DECODE, {"rows": [0]}),
        (DECODE, {"seq_lens": [5, 17]}),
        (DECODE, {"seq_lens": [5]}),
        (DECODE, {"seq_lens": [0, 1]}),
        (DECODE, {"out_slots": [100, 1]}),
        (DECODE, {"out_slots": [1]}),
        (DECODE, {"positions": [4, 16]}),
        (DECODE, {"token_ids": [0, 50]}),
        (DECODE, {"token_ids": []}),
        (PREFILL, {"prefix_lens": [2]}),
        (PREFILL, {"prefix_lens": [-1, 0]}),
        (PREFILL, {"extend_lens": [2, 2]}),
        (PREFILL, {"extend_lens": [0, 3]}),
        (PREFILL, {"table_slots": [5, 6]}),
        (PREFILL, {"table_slots": [5, 6, 100]}),
        (PREFILL, {"table_rows": [1, 2, 8]}),
        (DECODE, {"table_positions": [4, 16]}),
        (DECODE, {"table_positions": [4, -1]}),
        (PREFILL, {"seq_lens": [2, 2]}),
        (AHEAD, {"since": 2}),
        (AHEAD, {"since": 0}),
        (AHEAD, {"since": -1}),
        (AHEAD, {"first": 3, "end": 5, "since": 2}),
        (AHEAD, {"prefix_lens": [2, 0]}),
        (DECODE, {"first": 2, "since": 1}),
    ],
)
def test_one_wrong_field_is_refused(work: RunPieces, changes: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        check(msgspec.structs.replace(work, **changes))
