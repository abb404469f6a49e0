"""A limit of tokens per minute that a request can never meet is said once and for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from prism.config.sections.server import KeyConfig
from tests.server.live import LiveFront


@pytest.fixture(scope="module")
def limited(live: LiveFront) -> Iterator[LiveFront]:
    """The shared front door with a key of 100 tokens per minute."""
    key = KeyConfig(name="small", key="secret", tokens_per_minute=100)
    front, before = live.front, live.front.catalog
    after = replace(before, keys=(key,))
    front.catalog = front.gate.catalog = after
    yield live
    front.catalog = front.gate.catalog = before


AUTH = {"authorization": "Bearer secret"}


def refusal(live: LiveFront, path: str, body: dict[str, object]) -> dict[str, str]:
    answer = live.http.post(path, json={"model": "fast", **body}, headers=AUTH)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "tokens_over_limit"), error
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    assert "allowed 100 per minute" in error["message"]
    return error


@pytest.mark.parametrize(
    ("size", "more", "words", "param"),
    [
        (30, {"max_tokens": 71}, "Lower 'max_tokens' to 70 or less", "max_tokens"),
        (30, {"max_tokens": 40, "n": 2}, "Lower 'max_tokens' to 35 or less", "max_tokens"),
        (101, {"max_tokens": 1}, "Shorten the prompt", None),
    ],
)
def test_a_limit_that_can_never_be_met_is_final(
    limited: LiveFront, size: int, more: dict[str, object], words: str, param: str | None
) -> None:
    error = refusal(limited, "/v1/completions", {"prompt": [120] * size, **more})
    assert words in error["message"] and error["param"] == param


def test_an_answer_without_a_bound_may_fill_the_context(limited: LiveFront) -> None:
    messages = [{"role": "user", "content": "x" * 26}]  # 30 tokens with the template's
    error = refusal(limited, "/v1/chat/completions", {"messages": messages})
    assert "Without 'max_tokens'" in error["message"] and "set it to 70 or less" in error["message"]


def test_a_long_text_is_counted_before_it_is_refused(limited: LiveFront) -> None:
    error = refusal(limited, "/v1/completions", {"prompt": "x" * 300, "max_tokens": 1})
    assert "(300 in the prompt)" in error["message"], "not an estimate"


def test_what_fits_is_served_and_what_fits_later_is_told_when(limited: LiveFront) -> None:
    body = {"model": "fast", "prompt": [120] * 30, "max_tokens": 70}
    assert limited.http.post("/v1/completions", json=body, headers=AUTH).status_code == 200
    answer = limited.http.post("/v1/completions", json=body, headers=AUTH)
    assert answer.status_code == 429 and answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after"]) >= 1 and "in 0.0 s" not in answer.json()["error"]["message"]
