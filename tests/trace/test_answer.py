"""The client's view of a stream, however the bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.trace.replay.answer import Answer
from prism.trace.replay.sse import SseParser

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def token(text: str = "x", **more: object) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}], **more}


def stream(*chunks: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def fed(*timed: tuple[float, bytes]) -> Answer:
    answer = Answer()
    for at_s, piece in timed:
        answer.feed(piece, at_s)
    return answer


def test_tokens_and_their_times() -> None:
    answer = fed(
        (1.0, stream(ROLE, done=False)), (2.0, stream(token(), done=False)), (2.5, stream(token(), done=False)),
        (2.6, stream(token(), END, USAGE)),
    )  # fmt: skip
    assert (answer.first_s, answer.last_s, answer.events) == (2.0, 2.6, 3)
    assert answer.tokens == 3
    assert answer.prompt_tokens == 7
    assert sum(answer.gaps.values()) == 2
    assert answer.most_gap_s == pytest.approx(0.5)
    assert answer.finish == "length"
    assert answer.done
    assert not answer.error


@pytest.mark.parametrize(
    ("chunk", "counts"),
    [
        (ROLE, False),
        (END, False),
        (USAGE, False),
        (token(""), True),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": "Hi"}}]}, True),
        ({"choices": [{"text": "Hi", "finish_reason": None}]}, True),
        ({"choices": [{"text": "", "finish_reason": None}]}, True),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, False),
        ({"choices": [{"text": "Hi", "finish_reason": "stop"}]}, True),
        ({"id": "1", "unknown": {"x": 1}, "choices": []}, False),
    ],
)
def test_what_is_a_token_event(chunk: dict[str, object], counts: bool) -> None:
    assert fed((1.0, stream(chunk))).events == int(counts)


def test_server_errors_and_garbage_end_the_answer() -> None:
    answer = fed((1.0, stream(token(), {"error": {"message": "out of memory", "code": 500}}, token())))
    assert answer.error == "out of memory"
    assert answer.events == 1
    assert "not a chunk" in fed((1.0, b"data: {oops\n\n")).error


def test_without_usage_events_are_counted() -> None:
    assert fed((1.0, stream(token(), token()))).tokens == 2


@given(st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_cut_gives_the_same_answer(cuts: list[int], crlf: bool) -> None:
    data = b": keep-alive\n\n" + stream(ROLE, token("déjà"), token(), END, USAGE)
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    bounds = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    answer = fed(*((1.0, data[a:b]) for a, b in pairwise(bounds)))
    assert (answer.events, answer.tokens, answer.done, answer.error) == (2, 3, True, "")


def test_sse_ignores_other_fields() -> None:
    assert SseParser().feed(b"event: x\nid: 1\ndata:a\ndata: b\n: c\n\n") == [b"a", b"b"]
