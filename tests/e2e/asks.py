"""Requests that use everything the API has and whose answers are fixed: greedy, or with a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import openai

from .server import DEMOS, prompts

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "description": "Takes a note.", "parameters": SCHEMA}}
TOKENS = 80


@dataclass(frozen=True)
class Ask:
    """One request. ``body``: what the client sends, ``stream`` apart."""

    name: str
    chat: bool
    stream: bool
    body: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])


@dataclass
class Answer:
    """What came back, whichever way: one text per choice, its tokens' texts where they were asked for."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n".join(self.texts[index] + self.calls.get(index, "") for index in sorted(self.texts))


def _features() -> dict[str, dict[str, Any]]:
    greedy = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    repeated = {"ignore_eos": True, "repetition_penalty": 1.3}
    seeded = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": TOKENS}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA, "strict": True}}
    return {
        "greedy": greedy,
        "penalties": {**greedy, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        "repetition": {**greedy, "extra_body": repeated},
        "seeded": {**seeded, "extra_body": {"ignore_eos": True}},
        "stop": {**greedy, "stop": ["e ", "qu"]},
        "choices": {**seeded, "n": 2, "extra_body": {"ignore_eos": True}},
        "logprobs": {**greedy, "logprobs": 2},
        "structured": {"temperature": 0, "max_tokens": TOKENS, "response_format": form},
        "tool": {"temperature": 0, "max_tokens": TOKENS, "tools": [TOOL], "tool_choice": "required"},
    }


CHAT_ONLY = ("structured", "tool")


def _asks() -> list[Ask]:
    asks = []
    for i, (feature, options) in enumerate(_features().items()):
        for j, model in enumerate(DEMOS):
            chat, stream = feature in CHAT_ONLY or (i + j) % 3 == 0, (i + j) % 2 == 0
            prompt = prompts(12)[(i + 3 * j) % 12]
            given: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            if chat and "logprobs" in options:
                given |= {"logprobs": True, "top_logprobs": 2}
            name = f"{feature} {'chat' if chat else 'text'} {'stream' if stream else 'whole'} {model}"
            asks.append(Ask(name, chat, stream, {"model": model, **options, **given}))
    return asks


ASKS = _asks()


async def send(client: openai.AsyncOpenAI, ask: Ask) -> Answer:
    """The answer as a whole. Raises what the client library raises, also for an error inside a stream."""
    endpoint = client.chat.completions if ask.chat else client.completions
    reply: Any = await endpoint.create(**ask.body, stream=ask.stream)  # type: ignore[call-overload]
    answer = Answer()
    if ask.stream:
        async for chunk in reply:
            for choice in chunk.choices:
                _take(answer, choice, choice.delta if ask.chat else choice)
    else:
        for choice in reply.choices:
            _take(answer, choice, choice.message if ask.chat else choice)
    return answer


def _take(answer: Answer, choice: Any, part: Any) -> None:
    """A piece of a choice, or all of it."""
    index = choice.index
    text = getattr(part, "text", None) or getattr(part, "content", None) or ""
    answer.texts[index] = answer.texts.get(index, "") + text
    for call in getattr(part, "tool_calls", None) or ():
        said = (call.function.name or "") + (call.function.arguments or "")
        answer.calls[index] = answer.calls.get(index, "") + said
    if choice.finish_reason is not None:
        answer.ends[index] = choice.finish_reason
    if (logprobs := getattr(choice, "logprobs", None)) is not None:
        content = getattr(logprobs, "content", None)
        tokens = [entry.token for entry in content] if content else list(getattr(logprobs, "tokens", None) or ())
        answer.tokens.setdefault(index, []).extend(tokens)


def shown(ask: Ask) -> str:
    """The request as `curl -d` takes it."""
    body = {**ask.body, **ask.body.get("extra_body", {})}
    body.pop("extra_body", None)
    return json.dumps(body)
