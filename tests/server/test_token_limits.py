"""A limit of tokens per minute that a request can never meet is said once and for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from prism.config.sections import KeyConfig
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


@pytest.mark.parametrize(
    ("prompt", "more", "words", "param"),
    [
        ("x" * 30, {}, "set it to 70 or less", "max_tokens"),
        ("x" * 30, {"max_tokens": 71}, "Lower 'max_tokens' to 70 or less", "max_tokens"),
        ("x" * 30, {"max_tokens": 40, "n": 2}, "Lower 'max_tokens' to 35 or less", "max_tokens"),
        ("x" * 101, {"max_tokens": 1}, "Shorten the prompt", None),
    ],
)
def test_a_limit_that_can_never_be_met_is_final(
    limited: LiveFront, prompt: str, more: dict[str, object], words: str, param: str | None
) -> None:
    body = {"model": "fast", "prompt": prompt, **more}
    answer = limited.http.post("/v1/completions", json=body, headers={"authorization": "Bearer secret"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "tokens_over_limit", param)
    assert words in error["message"] and "allowed 100 per minute" in error["message"]
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers


def test_what_fits_is_served_and_what_fits_later_is_told_when(limited: LiveFront) -> None:
    auth = {"authorization": "Bearer secret"}
    body = {"model": "fast", "prompt": "x" * 30, "max_tokens": 70}
    assert limited.http.post("/v1/completions", json=body, headers=auth).status_code == 200
    answer = limited.http.post("/v1/completions", json=body, headers=auth)
    assert answer.status_code == 429 and answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after"]) >= 1 and "in 0.0 s" not in answer.json()["error"]["message"]
