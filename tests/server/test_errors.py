"""Whatever a client gets wrong is a 4xx with OpenAI's error object that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import ADMIN_KEY, LiveFront
from tests.server.tiny import CONTEXT, VOCAB

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "messages": MESSAGES, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "prompt": "abc", **fields}


def part(value: Any) -> list[dict[str, Any]]:
    """Messages with one content part."""
    return [{"role": "user", "content": [value]}]


BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}

BAD: list[tuple[str, Any, int, str | None, str]] = [
    (CHAT, [], 400, None, "invalid_json"),
    (CHAT, {}, 400, "model", "missing_parameter"),
    (CHAT, {"model": "fast"}, 400, "messages", "missing_parameter"),
    (CHAT, {"model": 3, "messages": MESSAGES}, 400, "model", "invalid_type"),
    (CHAT, chat(model="none"), 404, "model", "model_not_found"),
    (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    (CHAT, chat(messages="hi"), 400, "messages", "invalid_value"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages.0.content", "missing_parameter"),
    (CHAT, chat(messages=["hi"]), 400, "messages.0", "invalid_type"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages.0.content", "invalid_type"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages.0.content", "invalid_type"),
    (CHAT, chat(messages=part("hi")), 400, "messages.0.content.0", "invalid_type"),
    (CHAT, chat(messages=part({})), 400, "messages.0.content.0.type", "missing_parameter"),
    (CHAT, chat(messages=part({"type": 1})), 400, "messages.0.content.0.type", "invalid_type"),
    (CHAT, chat(messages=part({"type": "text"})), 400, "messages.0.content.0.text", "missing_parameter"),
    (CHAT, chat(messages=part({"type": "text", "text": 1})), 400, "messages.0.content.0.text", "invalid_type"),
    (CHAT, chat(messages=part({"type": "image_url"})), 400, "messages.0.content.0.image_url", "missing_parameter"),
    (CHAT, chat(messages=part({"type": "image_url", "image_url": "data:"})), 400, "messages.0.content.0.image_url",
     "invalid_type"),
    (CHAT, chat(messages=part({"type": "image_url", "image_url": {}})), 400, "messages.0.content.0.image_url.url",
     "missing_parameter"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), 400,
     "response_format.json_schema.schema", "missing_parameter"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}), 400,
     "response_format.json_schema.name", "missing_parameter"),
    (TEXT, text(prompt=None), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=3), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=["a", 5]), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=[1.5]), 400, "prompt", "invalid_type"),
    (TEXT, text(prompt=[[1, "a"]]), 400, "prompt", "invalid_type"),
    (TEXT, text(echo="true", max_tokens=0), 400, "echo", "invalid_type"),
    (TEXT, text(echo=1, max_tokens=0), 400, "echo", "invalid_type"),
    (CHAT, chat(colour="red"), 400, "colour", "unknown_parameter"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_value"),
    (CHAT, chat(temperature=-1), 400, "temperature", "invalid_value"),
    (CHAT, chat(top_p=2), 400, "top_p", "invalid_value"),
    (CHAT, chat(n=0), 400, "n", "invalid_value"),
    (CHAT, chat(n=10_000), 400, "n", "invalid_value"),
    (CHAT, chat(n="two"), 400, "n", "invalid_type"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (CHAT, chat(max_completion_tokens=-5), 400, "max_completion_tokens", "invalid_value"),
    (CHAT, chat(stop_token_ids=[VOCAB], min_tokens=1), 400, "stop_token_ids", "invalid_value"),
    (CHAT, chat(stop_regex="(a+)+$"), 400, "stop_regex", "unsupported_parameter"),
    (CHAT, chat(temperature=1e300), 400, "temperature", "invalid_value"),
    (CHAT, chat(regex="a" * 70_000), 400, "regex", "invalid_value"),
    (CHAT, chat(stop=[""]), 400, "stop", "invalid_value"),
    (CHAT, chat(stop=[1]), 400, "stop", "invalid_type"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias", "invalid_value"),
    (CHAT, chat(logit_bias={str(VOCAB): 1}), 400, "logit_bias", "invalid_value"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias", "invalid_type"),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs", "invalid_value"),
    (CHAT, chat(response_format="json"), 400, "response_format", "invalid_type"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format", "invalid_value"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "invalid_value"),
    (TEXT, text(response_format={}), 400, "response_format.type", "invalid_value"),
    (TEXT, text(temperature=-1), 400, "temperature", "invalid_value"),
    (CHAT, chat(top_p=0), 400, "top_p", "invalid_value"),
    (CHAT, chat(frequency_penalty=9), 400, "frequency_penalty", "invalid_value"),
    (CHAT, chat(min_tokens=9, max_tokens=3), 400, "min_tokens", "invalid_value"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (CHAT, chat(bootstrap_host="10.0.0.1"), 400, "bootstrap_host", "unsupported_parameter"),
    (CHAT, chat(return_hidden_states=True), 400, "return_hidden_states", "unsupported_parameter"),
    (CHAT, chat(tool_choice="required"), 400, "tools", "invalid_value"),
    (CHAT, chat(tools=[BAD_TOOL]), 400, "tools", "invalid_value"),
    (CHAT, chat(messages=[IMAGE]), 400, "messages.0.content", "unsupported_content"),
    (CHAT, chat(max_tokens=CONTEXT), 400, "messages", "context_length_exceeded"),
    (TEXT, text(prompt="x" * CONTEXT), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(prompt=""), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[[1, 2], []]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[VOCAB]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 300), 400, "prompt", "invalid_value"),
    (TEXT, text(logprobs=100), 400, "logprobs", "invalid_value"),
    (TEXT, text(best_of=3), 400, "best_of", "unsupported_parameter"),
    (TEXT, text(suffix="x"), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(model="broken"), 503, None, "model_unavailable"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    live: LiveFront, path: str, body: Any, status: int, param: str | None, code: str, stream: bool
) -> None:
    if stream and isinstance(body, dict) and body and "stream_options" not in body:
        body = {**body, "stream": True}
    answer = live.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-should-retry"] == "false"


def test_nothing_is_left_of_refused_requests(live: LiveFront) -> None:
    assert live.run(live.store.lengths(["prism:queue:device:local/host:0", "prism:queue:inactive"])) == [0, 0]
    assert not live.front.broker.streams


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": NaN}', b"\xff\xfe", b"[" * 5000, b'"x"', b"null"])
def test_malformed_json(live: LiveFront, body: bytes) -> None:
    answer = live.http.post(CHAT, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_huge_bodies_are_cut_off(live: LiveFront) -> None:
    body = b'{"model": "' + b"x" * (2 << 20) + b'"}'
    declared = live.http.post(CHAT, content=body)
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")
    chunked = live.http.post(CHAT, content=(body[i : i + 65536] for i in range(0, len(body), 65536)))
    assert chunked.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/admin/models", 401, "invalid_api_key"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
def test_paths_and_methods(live: LiveFront, method: str, path: str, status: int, code: str) -> None:
    answer = live.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_admin_bodies_are_checked(live: LiveFront) -> None:
    auth = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = live.http.post("/admin/drain", json={"devices": "x"}, headers=auth)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "devices")
    assert live.http.post("/admin/drain", json={}, headers=auth).status_code == 400
    assert live.http.get("/admin/models/none", headers=auth).json()["error"]["code"] == "model_not_found"


def test_openai_fields_that_change_nothing_are_accepted(live: LiveFront) -> None:
    body = chat(max_tokens=2, store=True, metadata={"a": "b"}, service_tier="auto", user="u", modalities=["text"])
    assert live.http.post(CHAT, json=body).status_code == 200


def test_every_strange_key_of_logit_bias_is_named(live: LiveFront) -> None:
    error = live.http.post(CHAT, json=chat(logit_bias={"one": 1, "5": 1, "two": 1})).json()["error"]
    assert error["message"] == "'logit_bias' needs token ids as keys (got 'one', 'two')."


def test_what_a_validator_says_is_a_sentence(live: LiveFront) -> None:
    error = live.http.post(CHAT, json=chat(tool_choice="required")).json()["error"]
    assert error["message"].endswith(".") and "Value error" not in error["message"]


def test_roles_are_told_with_the_commonest_first(live: LiveFront) -> None:
    error = live.http.post(CHAT, json=chat(messages=[*MESSAGES, {"role": "usr", "content": "hi"}])).json()["error"]
    assert (error["param"], error["code"]) == ("messages.1.role", "invalid_value")
    assert error["message"].startswith("'role' must be one of 'user', 'system'") and "(got 'usr')" in error["message"]


def test_a_stream_is_asked_for_with_true(live: LiveFront) -> None:
    error = live.http.post(CHAT, json=chat(stream="yes")).json()["error"]
    assert (error["param"], error["code"]) == ("stream", "invalid_type") and "(got 'yes')" in error["message"]
