"""Schemathesis over the OpenAPI document: whatever it sends, no answer is a 5xx and every error is OpenAI's object."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.wire.commands import AdminCommand
from tests.server.fuzzing import QUIET, fuzz, judge, load
from tests.server.live import ADMIN_KEY, LiveFront


@pytest.fixture(scope="session")
def document(live: LiveFront) -> dict[str, Any]:
    found: dict[str, Any] = live.http.get("/openapi.json").json()
    return found


def test_the_document_describes_the_api(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/readiness", "/metrics"} <= set(paths)
    assert {"/admin/models", "/admin/drain", "/admin/plan", "/admin/requests/{request_id}/cancel"} <= set(paths)
    request = document["components"]["schemas"]["ChatCompletionRequest"]
    assert request["additionalProperties"] is False and "bootstrap_host" not in request["properties"]


def test_no_server_error(document: dict[str, Any], live: LiveFront, commands: list[AdminCommand]) -> None:
    """The operators' calls too: a scripted controller answers them here, the real one in the end-to-end tests."""
    assert fuzz(load(deepcopy(document), ("fast", "quick", "none")), live.http, ADMIN_KEY) >= 20
    assert {c.verb for c in commands} == {"load", "unload", "pin", "unpin", "drain", "undrain", "reload", "plan"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_wrong_types_anywhere(live: LiveFront, document: dict[str, Any], path: str) -> None:
    """Valid requests in which up to three fields hold something else entirely."""
    name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = sorted(document["components"]["schemas"][name.rpartition("/")[2]]["properties"])
    valid = {"model": "fast", "max_tokens": 3}
    valid |= {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}

    @settings(QUIET, max_examples=150)
    @given(st.dictionaries(st.sampled_from(fields), JSON, min_size=1, max_size=3))
    def check(wrong: dict[str, Any]) -> None:
        answer = live.http.post(path, content=json.dumps({**valid, **wrong}).encode("utf-8", "surrogatepass"))
        judge(answer)

    check()
