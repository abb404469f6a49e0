"""The client's view of one streamed answer: when tokens came, how many, and how it ended."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from prism.trace.gaps import gap_bin
from prism.trace.replay.sse import SseParser


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder: Final = msgspec.json.Decoder(_Chunk)
DONE: Final = b"[DONE]"


class Answer:
    """Fed with the pieces of a response body and the time of each; all times on one clock, in seconds.

    A *token event* is a chunk that carries generated text. A chat chunk that only names the role, and the last chunk
    with nothing but a finish reason, are none.
    """

    __slots__ = ("_sse", "done", "error", "events", "finish", "first_s", "gaps", "last_s", "most_gap_s", "usage")

    def __init__(self) -> None:
        self._sse = SseParser()
        self.events = 0
        self.first_s = self.last_s = 0.0
        self.gaps: dict[int, int] = {}
        self.most_gap_s = 0.0
        self.usage: _Usage | None = None
        self.finish: str | None = None
        self.error = ""
        self.done = False

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take a piece of the body that arrived at ``now_s``. After an error nothing more is taken."""
        for payload in self._sse.feed(piece):
            if payload == DONE:
                self.done = True
            elif payload and not self.error:
                self._chunk(payload, now_s)

    @property
    def tokens(self) -> int:
        """Generated tokens: the server's count when it gives one, else the number of token events."""
        counted = self.usage.completion_tokens if self.usage else None
        return self.events if counted is None else counted

    @property
    def prompt_tokens(self) -> int | None:
        """The server's count of the prompt's tokens."""
        return self.usage.prompt_tokens if self.usage else None

    def _chunk(self, payload: bytes, now_s: float) -> None:
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError as exc:
            self.error = f"not a chunk of an OpenAI stream: {exc}: {payload[:120]!r}"
            return
        if chunk.error is not None:
            self.error = _error_text(chunk.error)
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if _has_tokens(choice):
                self._event(now_s)
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason

    def _event(self, now_s: float) -> None:
        if self.events:
            gap_s = now_s - self.last_s
            index = gap_bin(gap_s)
            self.gaps[index] = self.gaps.get(index, 0) + 1
            self.most_gap_s = max(self.most_gap_s, gap_s)
        else:
            self.first_s = now_s
        self.events += 1
        self.last_s = now_s


def _has_tokens(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)
    if delta.content or delta.reasoning_content or delta.tool_calls:
        return True
    return delta.content is not None and delta.role is None and choice.finish_reason is None


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
