"""The official client, unmodified."""

from __future__ import annotations

import json

import openai
import pytest

from prism.engine.fake_payload import fake_tokens
from tests.server.conftest import LETTERS
from tests.server.live import LiveFront
from tests.server.tiny import ASSISTANT, BOS, EOS, USER

HI = [{"role": "user", "content": "hi"}]
HI_IDS = (BOS, USER, *b"hi", EOS, ASSISTANT)


def expected(prompt: tuple[int, ...], count: int) -> str:
    """What the fake engines answer to ``prompt``."""
    return bytes(fake_tokens(prompt, 0, count, LETTERS)).decode()


@pytest.mark.parametrize("model", ["fast", "slow", "quick"])
def test_chat(live: LiveFront, model: str) -> None:
    answer = live.client().chat.completions.create(model=model, messages=HI, max_tokens=7)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == expected(HI_IDS, 7)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(HI_IDS), 7)
    assert answer.id.startswith("chatcmpl-") and answer.model == model


@pytest.mark.parametrize("model", ["fast", "slow"])
def test_chat_stream_with_usage(live: LiveFront, model: str) -> None:
    stream = live.client().chat.completions.create(  # type: ignore[call-overload]
        model=model, messages=HI, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected(HI_IDS, 7)
    assert {c.id for c in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7


async def test_async_client(live: LiveFront) -> None:
    client = live.async_client()
    answer = await client.chat.completions.create(model="fast", messages=HI, max_tokens=5)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == expected(HI_IDS, 5)
    stream = await client.chat.completions.create(model="slow", messages=HI, max_tokens=5, stream=True)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == expected(HI_IDS, 5) and len(pieces) > 3
    await client.close()


def test_text_completion_and_echo(live: LiveFront) -> None:
    client = live.client()
    answer = client.completions.create(model="fast", prompt="abc", max_tokens=4)
    assert answer.choices[0].text == expected(tuple(b"abc"), 4)
    echoed = client.completions.create(model="fast", prompt="abc", max_tokens=4, echo=True)
    assert echoed.choices[0].text == "abc" + expected(tuple(b"abc"), 4)
    ids = client.completions.create(model="fast", prompt=[1, 2, 3], max_tokens=4)
    assert ids.choices[0].text == expected((1, 2, 3), 4)
    stream = client.completions.create(model="slow", prompt="abc", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected(tuple(b"abc"), 4)


def test_several_prompts_and_choices(live: LiveFront) -> None:
    client = live.client()
    answer = client.completions.create(model="fast", prompt=["abc", "xyz"], n=2, max_tokens=3)
    wanted = [expected(tuple(p), 3) for p in (b"abc", b"abc", b"xyz", b"xyz")]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    stream = client.chat.completions.create(model="slow", messages=HI, n=3, max_tokens=4, stream=True)  # type: ignore[call-overload]
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys(range(3), expected(HI_IDS, 4))


def test_logprobs(live: LiveFront) -> None:
    client = live.client()
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="fast", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == expected(HI_IDS, 3)
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)
    stream = client.chat.completions.create(model="slow", messages=HI, max_tokens=3, logprobs=True, stream=True)  # type: ignore[call-overload]
    tokens = [e.token for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert "".join(tokens) == expected(HI_IDS, 3)
    text = client.completions.create(model="fast", prompt="abc", max_tokens=3, logprobs=1)
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or []) == 3


def test_sampling_parameters_reach_the_engine(live: LiveFront) -> None:
    from prism.engine.sglang_codec import decode_request

    seen = []
    handle = live.node.handles["fast"]
    original = handle.submit
    handle.submit = lambda work: (seen.append(decode_request(work.payload)), original(work))[1]  # type: ignore[method-assign]
    try:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        live.client().chat.completions.create(  # type: ignore[call-overload]
            model="fast",
            messages=HI,
            max_tokens=3,
            n=2,
            seed=7,
            temperature=0.3,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            stop=["END"],
            logit_bias={"5": 3},
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
    finally:
        handle.submit = original  # type: ignore[method-assign]
    first, second = (request.sampling_params for request in seen)
    assert (first.sampling_seed, second.sampling_seed) == (7, 8), "the choices of one prompt differ"
    assert (first.temperature, first.top_p, first.presence_penalty, first.frequency_penalty) == (0.3, 0.9, 0.5, -0.5)
    assert first.stop_strs == ["END"] and json.loads(first.json_schema) == schema and first.logit_bias == {"5": 3}
    assert len({request.rid for request in seen}) == 2


def script(live: LiveFront, model: str, text: str) -> None:
    live.node.handles[model].answer = lambda prompt: list(text.encode())


def test_reasoning_and_tool_calls(live: LiveFront) -> None:
    model, client = "org/thinker:7b", live.client()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    try:
        script(live, model, "<think>hm</think>yes")
        plain = client.chat.completions.create(model=model, messages=HI)  # type: ignore[call-overload]
        said = plain.choices[0].message.to_dict()
        assert said["content"] == "yes" and said["reasoning_content"] == "hm"
        script(live, model, call)
        answer = client.chat.completions.create(model=model, messages=HI, tools=tools)  # type: ignore[call-overload]
        [made] = answer.choices[0].message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = client.chat.completions.create(model=model, messages=HI, tools=tools, stream=True)  # type: ignore[call-overload]
        deltas = [c.delta.tool_calls[0] for chunk in stream for c in chunk.choices if c.delta.tool_calls]
        assert deltas[0].function.name == "add"
        assert json.loads("".join(d.function.arguments or "" for d in deltas)) == {"a": 1}
    finally:
        live.node.handles[model].answer = None


def test_an_emoji_split_over_tokens_arrives_whole(live: LiveFront) -> None:
    handle = live.node.handles["slow"]
    handle.answer = lambda prompt: list("a🙂é".encode())
    try:
        stream = live.client().chat.completions.create(model="slow", messages=HI, stream=True)  # type: ignore[call-overload]
        pieces = [c.delta.content or "" for chunk in stream for c in chunk.choices]
    finally:
        handle.answer = None
    assert "".join(pieces) == "a🙂é" and not any("\ufffd" in piece for piece in pieces)


def test_models_listing(live: LiveFront) -> None:
    client = live.client()
    states = {model.id: model.state for model in client.models.list().data}  # type: ignore[attr-defined]
    assert states["fast"] == "ready" and states["cold"] == "inactive"
    assert client.models.retrieve("org/thinker:7b").id == "org/thinker:7b"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'fast'"):
        client.models.retrieve("fas")
