"""Prompts larger than a device: who is one, the window, and whether the tiers hold them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.long_prompts import (
    ENDLESS,
    LongShape,
    TierRoom,
    bring_order,
    first_host_bytes,
    first_piece,
    goes_long,
    judge_tiers,
    leaves_room,
    most_long_tokens,
    plan_window,
)

TOKEN_BYTES = st.sampled_from([256, 1024, 4096, 8192])
SHAPES = st.builds(LongShape, st.integers(1, 96), TOKEN_BYTES) | st.builds(
    lambda sees, nbytes: LongShape(len(sees) + 1, nbytes, (*sees, 0)),
    st.lists(st.integers(0, 5000), max_size=12),
    TOKEN_BYTES,
)
ROOMS = st.lists(
    st.builds(lambda free, more: TierRoom("t", free, free + more), st.integers(0, 1 << 34), st.integers(0, 1 << 34)),
    min_size=1,
    max_size=3,
)


def test_a_request_is_long_when_its_prompt_and_the_beginning_of_its_answer_do_not_fit() -> None:
    assert not goes_long(800, 1 << 30, 1000)
    assert goes_long(940, 1 << 30, 1000), "64 tokens of its answer would not fit"
    assert not goes_long(940, 10, 1000), "it asks for ten"
    assert goes_long(2000, 1, 1000)


@given(shape=SHAPES, most=st.integers(0, 1 << 30), ahead=st.integers(1, 4))
def test_the_window_is_the_largest_that_fits(shape: LongShape, most: int, ahead: int) -> None:
    plan = plan_window(shape, most, ahead)
    smallest = 8 * shape.token_bytes * (shape.layers + 1 + ahead)
    assert (plan is None) == (most < smallest)
    if plan is not None:
        assert plan.slots == 1 + ahead
        assert plan.nbytes == plan.unit_bytes * (shape.layers + plan.slots) <= most
        assert plan.piece_tokens == 512 or 2 * plan.nbytes > most


def test_a_window_of_the_only_page_leaves_no_room() -> None:
    plan = plan_window(LongShape(4, 1024), 512 << 10)
    assert plan is not None
    assert not leaves_room(plan, 2 << 20, 2 << 20), "a quarter of it, which takes all of it"
    assert leaves_room(plan, 4 << 20, 2 << 20)


@given(shape=SHAPES, rooms=ROOMS, extra=st.integers(1, 2000))
def test_the_longest_request_fits_when_nobody_else_is_there_and_a_longer_one_does_not(
    shape: LongShape, rooms: list[TierRoom], extra: int
) -> None:
    plan = plan_window(shape, 1 << 40)
    assert plan is not None
    most = most_long_tokens(shape, plan, rooms)
    assert judge_tiers(shape, plan, most, rooms).may_fit
    beyond = judge_tiers(shape, plan, most + extra, rooms)
    assert not beyond.may_fit
    assert not beyond.fits, "what does not fit an empty machine does not fit a full one"


@given(layers=st.integers(1, 40), pieces=st.integers(0, 40))
def test_every_unit_comes_once_a_step_layer_by_layer(layers: int, pieces: int) -> None:
    order = list(bring_order([0] * layers, pieces))
    assert len(order) == len(set(order)) == layers * pieces
    assert order == sorted(order)


@given(before=st.integers(0, 200), tokens=st.integers(0, 1000), piece=st.sampled_from([8, 16, 64]))
def test_a_layer_that_sees_the_last_tokens_only_has_the_pieces_they_are_in(
    before: int, tokens: int, piece: int
) -> None:
    shape, pieces = LongShape(1, 1, (before,)), tokens // piece
    order = list(bring_order([first_piece(before, tokens, piece)], pieces))
    seen = {token // piece for token in range(max(0, tokens - before) if before else 0, tokens)}
    assert [number for _, number in order] == [number for number in range(pieces) if number in seen]
    assert len(order) <= shape.units(pieces, piece)


def test_where_no_layer_sees_everything_no_request_is_too_long() -> None:
    shape, plan = LongShape(2, 1024, (100, 50)), plan_window(LongShape(2, 1024), 1 << 20)
    assert plan is not None
    units = shape.units(1000, plan.piece_tokens)
    assert most_long_tokens(shape, plan, [TierRoom("t", 0, units * plan.unit_bytes)]) >= ENDLESS - 1
    assert most_long_tokens(shape, plan, [TierRoom("t", 0, (units - 1) * plan.unit_bytes)]) < 1000


@given(needed=st.integers(0, 1 << 40), lent=st.integers(0, 1 << 40))
def test_host_memory_is_taken_for_what_lenders_do_not_cover(needed: int, lent: int) -> None:
    taken = first_host_bytes(needed, lent)
    assert 0 <= taken <= needed
    assert taken + lent >= needed


def test_a_refusal_names_what_is_needed_and_what_there_is() -> None:
    shape = LongShape(2, 1024)
    plan = plan_window(shape, 1 << 20)
    assert plan is not None
    verdict = judge_tiers(shape, plan, 4096, [TierRoom("lent memory", 0, 1 << 20), TierRoom("host memory", 0, 2 << 20)])
    assert not verdict.may_fit
    assert "8.0 MiB" in verdict.words()
    assert "lent memory 1.0 MiB, host memory 2.0 MiB" in verdict.words()
