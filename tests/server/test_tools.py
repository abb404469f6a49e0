"""Demanded tool calls are forced; without a parser nobody gets a call as plain text for an answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from prism.core.ids import ModelName
from tests.server.live import LiveFront
from tests.server.tiny import EOS, VOCAB

PARSED, PLAIN = "org/thinker:7b", "fast"


def tool(name: str, **more: object) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("alpha"), tool("beta"), tool("gamma")]
SMALL = [{"type": "function", "function": {"name": "beta"}}]
BETA = {"type": "function", "function": {"name": "beta"}}


def chat(model: str, **more: object) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **more}


def sampling(live: LiveFront, **more: object) -> dict[str, Any]:
    """What the engine is told of a request."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    served = live.run(live.front.models.get(ModelName(PARSED)))
    return (
        served.endpoints["/v1/chat/completions"]
        .convert(ChatCompletionRequest.model_validate(chat(PARSED, **more)))
        .sampling_params
    )


def babble(live: LiveFront, structural_tag: str, seed: int) -> str:
    """What a model that knows nothing says under the grammar that SGLang makes of ``structural_tag``."""
    import torch
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    tokenizer = live.run(live.front.models.get(ModelName(PARSED))).manager.tokenizer
    backend = XGrammarGrammarBackend(tokenizer, vocab_size=VOCAB, model_eos_token_ids=[EOS])
    grammar = backend.dispatch_structural_tag(structural_tag)
    matcher, mask, dice = grammar.matcher, xgrammar.allocate_token_bitmask(1, VOCAB), random.Random(seed)
    said: list[int] = []
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        bits = torch.tensor([bool(mask[0, i // 32] >> (i % 32) & 1) for i in range(VOCAB)])
        token = dice.choice(bits.nonzero().flatten().tolist())
        assert matcher.accept_token(token)
        if token != EOS:
            said.append(token)
        assert len(said) < 5000
    return str(tokenizer.decode(said))


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
@pytest.mark.parametrize("seed", range(6))
def test_a_named_tool_is_called_once_with_arguments_of_its_schema(live: LiveFront, seed: int) -> None:
    said = babble(live, sampling(live, tool_choice=BETA)["structural_tag"], seed)
    with live.answering(PARSED, said):
        answer = live.http.post("/v1/chat/completions", json=chat(PARSED, tool_choice=BETA)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "beta"
    assert arguments.keys() == {"n"} and arguments["n"] in range(10)


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_has_arguments_of_its_schema(live: LiveFront, seed: int) -> None:
    tag = json.loads(sampling(live, tool_choice="required")["structural_tag"])
    assert all(s["schema"]["required"] == ["n"] for s in tag["structures"]) and tag["at_least_one"]


def test_a_tool_without_parameters_takes_an_object(live: LiveFront) -> None:
    tag = json.loads(sampling(live, tools=SMALL, tool_choice=BETA)["structural_tag"])
    assert tag["format"]["content"]["json_schema"] == {"type": "object"}


def test_a_free_choice_is_left_alone(live: LiveFront) -> None:
    assert "structural_tag" not in sampling(live, tool_choice="auto")


@pytest.mark.parametrize("choice", ["required", BETA], ids=["required", "named"])
def test_a_demanded_call_without_a_parser_is_refused(live: LiveFront, choice: object) -> None:
    answer = live.http.post("/v1/chat/completions", json=chat(PLAIN, tool_choice=choice))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "tool_choice")
    assert "'tools'" in error["message"] and "'tool_call_parser'" in error["message"]


@pytest.mark.parametrize("model", [PARSED, PLAIN])
def test_a_named_tool_that_is_not_there_is_refused_with_those_that_are(live: LiveFront, model: str) -> None:
    missing = {"type": "function", "function": {"name": "delta"}}
    answer = live.http.post("/v1/chat/completions", json=chat(model, tool_choice=missing))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "tool_choice")
    assert error["message"] == "'tool_choice' names 'delta'; 'tools' has 'alpha', 'beta', 'gamma'."


def test_a_call_in_the_history_whose_arguments_are_no_json_is_refused(live: LiveFront) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "beta", "arguments": "{nope"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    answer = live.http.post("/v1/chat/completions", json={**chat(PARSED), "messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"].endswith("valid JSON.") and not error["message"].endswith("..")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_without_a_parser_are_passed_to_the_model_with_a_warning(live: LiveFront, stream: bool) -> None:
    answer = live.http.post("/v1/chat/completions", json=chat(PLAIN, tools=SMALL, max_tokens=3, stream=stream))
    assert answer.status_code == 200
    assert answer.headers["x-prism-warning"].startswith("no-tool-call-parser; model='fast'")
    parsed = live.http.post("/v1/chat/completions", json=chat(PARSED, tools=SMALL, max_tokens=3, stream=stream))
    assert "x-prism-warning" not in parsed.headers
    none = live.http.post("/v1/chat/completions", json=chat(PLAIN, tools=SMALL, max_tokens=3, tool_choice="none"))
    assert "x-prism-warning" not in none.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", {"type": "json_object"}), ("regex", "a+"), ("ebnf", 'root ::= "a"')],
)
def test_two_grammars_exclude_each_other(live: LiveFront, field: str, value: object) -> None:
    answer = live.http.post("/v1/chat/completions", json=chat(PARSED, tool_choice=BETA, **{field: value}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_the_warning_is_a_header_whatever_a_model_is_called(live: LiveFront) -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    from prism.server.sglang_tools import check_tools

    warning = check_tools(ChatCompletionRequest.model_validate(chat(PLAIN)), None, "模型\r\nx: y")
    assert warning is not None and warning.encode("latin-1").isascii() and "\r" not in warning
