"""Log-probabilities: all alternatives, their bytes, where tokens stand, prompts repeated with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import ModelName
from tests.server.live import LiveFront

TEXT = "naïve 😀 ¿qué?"


def complete(live: LiveFront, **more: object) -> dict[str, Any]:
    answer = live.http.post("/v1/completions", json={"model": "fast", "prompt": "hi", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def chunks(live: LiveFront, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = live.http.post(path, json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [event["choices"][0] for event in events if event["choices"]]


def chat_tokens(live: LiveFront, stream: bool) -> list[dict[str, Any]]:
    body = {"model": "fast", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    if not stream:
        answer = live.http.post("/v1/chat/completions", json=body).json()
        return answer["choices"][0]["logprobs"]["content"]
    found = chunks(live, "/v1/chat/completions", body)
    return [token for choice in found for token in (choice.get("logprobs") or {"content": []})["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_tokens_have_their_bytes_and_all_alternatives(live: LiveFront, stream: bool) -> None:
    with live.answering("fast", TEXT):
        tokens = chat_tokens(live, stream)
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == TEXT
    for token in tokens:
        assert len(token["top_logprobs"]) == 5
        assert len({tuple(top["bytes"]) for top in token["top_logprobs"]}) == 5
        assert token["top_logprobs"][0]["bytes"] == token["bytes"], "its own alternatives, not the first token's"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_alternatives_are_all_there_and_stand_where_they_stand(live: LiveFront, stream: bool) -> None:
    with live.answering("fast", TEXT):
        body = {"model": "fast", "prompt": "hi", "logprobs": 5}
        found = [complete(live, logprobs=5)] if not stream else chunks(live, "/v1/completions", body)
    parts = [choice["logprobs"] for choice in found if choice.get("logprobs")]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert all(len(top) == 5 for part in parts for top in part["top_logprobs"])
    assert tokens[2:4] == [r"bytes:\xc3", r"bytes:\xaf"], "halves of a character"
    assert len(offsets) == len(TEXT.encode())
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or TEXT[offset] == token
    assert offsets == sorted(offsets) and offsets[-1] == len(TEXT) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_zero_is_a_prompt(live: LiveFront, stream: bool) -> None:
    body = {"model": "fast", "prompt": [0], "max_tokens": 3, "stream": stream}
    assert live.http.post("/v1/completions", json=body).status_code == 200
    body["prompt"] = [[0], [0, 1]]
    assert live.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_prompt_can_be_repeated_with_log_probabilities(live: LiveFront, logprobs: int, stream: bool) -> None:
    body = {"model": "fast", "prompt": "héllo", "echo": True, "logprobs": logprobs, "max_tokens": 4}
    found = chunks(live, "/v1/completions", body) if stream else [complete(live, **body)]
    text = "".join(choice["text"] for choice in found)
    parts = [choice["logprobs"] for choice in found if choice.get("logprobs")]
    assert text.startswith("héllo") and len(text) == 9
    answer = [(t, o) for part in parts for t, o in zip(part["tokens"], part["text_offset"], strict=True)][-4:]
    assert answer == [(text[i], i) for i in range(5, 9)]
    if not logprobs:
        assert not any(part["top_logprobs"] for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_prompt_is_repeated_without_an_answer(live: LiveFront, logprobs: int | None, stream: bool) -> None:
    body = {"model": "fast", "prompt": "héllo", "echo": True, "logprobs": logprobs, "max_tokens": 0, "n": 2}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    answer = live.http.post("/v1/completions", json={**body, **usage, "stream": stream})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
    told = [json.loads(line) for line in lines] if stream else [answer.json()]
    for index in range(2):
        found = [one for event in told for one in event["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in found) == "héllo"
        assert [one["finish_reason"] for one in found if one["finish_reason"]] == ["length"]
        assert not any(one["logprobs"]["tokens"] for one in found if one.get("logprobs")), (
            "engines here give no prompt's"
        )
    assert told[-1]["usage"]["completion_tokens"] == 0
    assert told[-1]["usage"]["prompt_tokens"] == len("héllo".encode())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": False}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/completions", {"prompt": [True, 2]}, "prompt"),
        ("/v1/completions", {"prompt": [[3], [1, False]]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_no_answer_is_for_prompts_that_are_repeated_and_ids_are_numbers(
    live: LiveFront, path: str, body: dict[str, Any], param: str
) -> None:
    answer = live.http.post(path, json={"model": "fast", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_failure_of_ours_is_not_told_as_the_clients(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    served = live.run(live.front.models.get(ModelName("fast")))

    def broken(*_: object) -> None:
        raise KeyError("input_top_logprobs")

    monkeypatch.setattr(served.endpoints["/v1/completions"], "_build_completion_response", broken)
    answer = live.http.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@given(st.text(min_size=1, max_size=30))
def test_offsets_and_bytes_of_any_text(live: LiveFront, text: str) -> None:
    from prism.server.token_text import Offsets, token_bytes

    tokenizer = live.run(live.front.models.get(ModelName("fast"))).manager.tokenizer
    ids = tokenizer(text)["input_ids"]
    places = Offsets(tokenizer, [], True, True)
    offsets = [places.place(token) for token in ids]
    assert b"".join(token_bytes(tokenizer, t, tokenizer.decode([t])) for t in ids) == text.encode()
    if "\ufffd" not in text:
        begins = [i for i, letter in enumerate(text) for _ in letter.encode()]
        assert offsets == begins and places.chars == len(text)


@pytest.mark.parametrize(("piece", "data"), [("<0xE2>", b"\xe2"), ("âĤ¬", "€".encode()), ("\u4e16", b"\xef\xbf\xbd")])
def test_pieces_of_other_vocabularies(piece: str, data: bytes) -> None:
    from prism.server.token_text import token_bytes

    class Tokenizer:
        def convert_ids_to_tokens(self, token_id: int) -> str:
            return piece

    assert token_bytes(Tokenizer(), 1, "\ufffd") == data
