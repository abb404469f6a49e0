"""Names say which tokens: equal for equal beginnings, different for anything else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prism.kv.naming import PIECE_TOKENS, PieceChain, as_tokens, space_of

SPACE = space_of("model", 1)
sequences = st.lists(st.integers(0, 3), max_size=3 * PIECE_TOKENS)


def names(tokens: list[int], space: str = SPACE) -> list[str]:
    return [piece.file for piece in PieceChain(space, as_tokens(tokens)).pieces()]


@given(sequences, sequences)
def test_pieces_are_shared_as_far_as_tokens_are(a: list[int], b: list[int]) -> None:
    alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    same = [x == y for x, y in zip(names(a), names(b), strict=False)]
    whole = alike // PIECE_TOKENS
    assert all(same[:whole])
    assert not any(same[whole + 1 :])
    if whole < len(same):
        assert same[whole] == (a[whole * PIECE_TOKENS :][:PIECE_TOKENS] == b[whole * PIECE_TOKENS :][:PIECE_TOKENS])


def test_pieces_cover_the_sequence_from_any_token_on() -> None:
    chain = PieceChain(SPACE, as_tokens(range(150)))
    assert [(p.first, p.end, p.position) for p in chain.pieces()] == [(0, 64, 0), (64, 128, 1), (128, 150, 2)]
    assert [p.first for p in chain.pieces(127)] == [64, 128]
    assert list(PieceChain(SPACE, as_tokens([])).pieces()) == []


def test_a_shorter_piece_has_the_name_it_had_as_an_end() -> None:
    longer = PieceChain(SPACE, as_tokens(range(300)))
    (_, _, end) = PieceChain(SPACE, as_tokens(range(150))).pieces()
    shorter = list(longer.shorter(128))
    assert [p.end for p in shorter] == list(range(191, 128, -1)) and end in shorter
    assert [p.end for p in PieceChain(SPACE, as_tokens(range(130))).shorter(128)] == [130, 129]


def test_spaces_do_not_meet() -> None:
    others = [space_of("model", 2), space_of("model", 1, ""), space_of("other", 1)]
    found = {name for space in (SPACE, *others) for name in names(list(range(100)), space)}
    assert len(found) == 2 * 4


def test_tokens_of_any_integer_array_are_the_same() -> None:
    arrays = (list(range(9)), np.arange(9), np.arange(18)[::2] // 2, np.arange(9, dtype=np.int32))
    assert len({PieceChain(SPACE, as_tokens(a)).piece(0, 9) for a in arrays}) == 1
