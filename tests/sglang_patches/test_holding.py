"""When a step is not made because the engine stands still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.holding import stands_still


def made(held_s: float = 1.0, **changes: Any) -> Any:
    """A scheduler that decodes and has nothing else to do."""
    seat = SimpleNamespace(held_s=lambda: held_s, world=changes.pop("world", 1))
    found = {"waiting_queue": [], "chunked_req": None, "grammar_manager": (), "prism_remote": None, "prism_long": None}
    return SimpleNamespace(server_args=SimpleNamespace(prism_seat=seat), **{**found, **changes})


def batch(*, decodes: bool = True, empty: bool = False) -> Any:
    return SimpleNamespace(is_empty=lambda: empty, forward_mode=SimpleNamespace(is_decode=lambda: decodes))


def test_a_decode_step_is_not_made_while_it_is_held() -> None:
    assert stands_still(made(), batch(), None) and stands_still(made(), batch(), batch())
    assert not stands_still(made(held_s=0.0), batch(), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting_queue": ["a prompt"]},
        {"chunked_req": "a prompt's rest"},
        {"grammar_manager": ("a prompt's grammar",)},
        {"world": 2},
        {"prism_remote": "others wait for its layers"},
        {"prism_long": "a long prompt's turns"},
    ],
)
def test_prompts_and_steps_that_others_wait_for_are_made(changes: dict[str, Any]) -> None:
    assert not stands_still(made(**changes), batch(), None)


def test_what_was_prefilled_last_joins_those_that_run_and_nothing_rests_where_nothing_runs() -> None:
    assert not stands_still(made(), batch(), batch(decodes=False))
    assert not stands_still(made(), batch(empty=True), None)
