"""Loads are told every now and then, and a piece of the model that came at once."""

from __future__ import annotations

from prism.engine.telling import EVERY_S, IDLE_S, LoadTelling


def test_a_piece_that_came_is_told_at_once() -> None:
    telling = LoadTelling()
    assert telling.looks(10.0, 3) and telling.tells(10.0, changed=True)
    assert not telling.looks(10.0, 3)
    assert telling.looks(10.0 + EVERY_S / 2, 4) and telling.tells(10.0 + EVERY_S / 2, changed=True)
    assert not telling.looks(10.0 + EVERY_S, 4)


def test_what_has_not_changed_is_told_now_and_then() -> None:
    telling = LoadTelling()
    assert telling.tells(10.0, changed=True)
    assert telling.looks(10.0 + 2 * EVERY_S, 0) and not telling.tells(10.0 + 2 * EVERY_S, changed=False)
    assert telling.tells(10.0 + IDLE_S, changed=False)
