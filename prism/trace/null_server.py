"""A server that answers at once: the OpenAI streaming API with nothing behind it, to measure clients against.

``python -m prism.trace.null_server --port 0 --ttft-ms 20 --tpot-ms 5 --log FILE`` prints its URL as its first line.
Each request gets ``max_tokens`` tokens, the first after the TTFT, the others one TPOT apart (0: together). ``FILE``
gets one line ``ID RECEIVED FIRST LAST`` per request, in seconds of the machine's monotonic clock: what the server saw.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import json
import resource
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import IO, Final

import httptools
import msgspec
import uvloop

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TICK_S: Final = 0.001


class _Body(msgspec.Struct):
    model: str = ""
    max_tokens: int = 16
    stream: bool = False
    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] = []


_decoder: Final = msgspec.json.Decoder(_Body)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: dict[str, object]) -> bytes:
    return _chunked(b"data: " + json.dumps(value).encode() + b"\n\n")


_TEXT_TOKEN: Final = _event(
    {"object": "text_completion", "choices": [{"index": 0, "text": " word", "finish_reason": None}]}
)
_CHAT_TOKEN: Final = _event({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
_CHAT_ROLE: Final = _event(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
)


class _Stream:
    """An answer under way."""

    __slots__ = ("chat", "first_s", "left", "name", "owner", "prompt_tokens", "received_s", "total")

    def __init__(self, owner: _NullConnection, name: str, chat: bool, body: _Body, received_s: float) -> None:
        self.owner, self.name, self.chat, self.received_s = owner, name, chat, received_s
        self.left = self.total = max(1, body.max_tokens)
        self.prompt_tokens = _prompt_tokens(body)
        self.first_s = 0.0


class NullServer:
    """All streams, driven by one tick of a millisecond."""

    def __init__(self, ttft_s: float, tpot_s: float, log: IO[str] | None) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self._log, self._lines = log, list[str]()
        self._due: list[tuple[float, int, _Stream]] = []
        self._number = 0
        self.requests: Counter[str] = Counter()

    def open(self, stream: _Stream, model: str) -> None:
        self.requests[model] += 1
        self._schedule(stream, stream.received_s + self.ttft_s)

    def _schedule(self, stream: _Stream, at_s: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (at_s, self._number, stream))
        if at_s <= perf_counter():
            self._advance()

    def _advance(self) -> None:
        now_s = perf_counter()
        while self._due and self._due[0][0] <= now_s:
            at_s, _, stream = heapq.heappop(self._due)
            self._token(stream, at_s, now_s)

    def _token(self, stream: _Stream, at_s: float, now_s: float) -> None:
        if stream.owner.transport is None or stream.owner.transport.is_closing():
            return
        token = _CHAT_TOKEN if stream.chat else _TEXT_TOKEN
        count = stream.left if self.tpot_s == 0 else 1
        parts = [token] * count
        if not stream.first_s:
            stream.first_s = perf_counter()
            parts[:0] = [_HEAD, _CHAT_ROLE] if stream.chat else [_HEAD]
        stream.left -= count
        if not stream.left:
            parts += [_ending(stream), b"0\r\n\r\n"]
        stream.owner.transport.write(b"".join(parts))
        if stream.left:
            self._number += 1
            heapq.heappush(self._due, (at_s + self.tpot_s, self._number, stream))
        elif self._log is not None:
            self._lines.append(f"{stream.name} {stream.received_s:.6f} {stream.first_s:.6f} {perf_counter():.6f}\n")

    async def run(self) -> None:
        """Drive the streams for ever; the log is written twice a second."""
        flushed_s = perf_counter()
        while True:
            self._advance()
            if self._log is not None and perf_counter() - flushed_s > 0.5:
                self._log.write("".join(self._lines))
                self._log.flush()
                self._lines.clear()
                flushed_s = perf_counter()
            await asyncio.sleep(_TICK_S)


class _NullConnection(asyncio.Protocol):
    """One client connection; requests on it come one after the other."""

    def __init__(self, server: NullServer) -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._name = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self.transport is not None:
                self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._name = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url, name, data = self._url, self._name.decode(), b"".join(self._body)
        self._url, self._name = b"", b""
        self._body.clear()
        if not url.endswith(b"/completions"):
            self._plain(200 if url.endswith((b"/models", b"/health")) else 404, {"object": "list", "data": []})
            return
        try:
            body = _decoder.decode(data)
        except msgspec.DecodeError as exc:
            self._plain(400, {"error": {"message": str(exc), "type": "invalid_request_error"}})
            return
        if not body.stream:
            self._plain(200, _whole_answer(body))
            return
        stream = _Stream(self, name, b"/chat/" in url, body, perf_counter())
        self._server.open(stream, body.model)

    def _plain(self, status: int, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        if self.transport is not None:
            self.transport.write(head.encode() + body)


def _ending(stream: _Stream) -> bytes:
    usage = {"prompt_tokens": stream.prompt_tokens, "completion_tokens": stream.total}
    last: dict[str, object] = {"delta": {}} if stream.chat else {"text": ""}
    finish = _event({"choices": [{"index": 0, **last, "finish_reason": "length"}]})
    return finish + _event({"choices": [], "usage": usage}) + _chunked(b"data: [DONE]\n\n")


def _whole_answer(body: _Body) -> dict[str, object]:
    """The answer of a request that does not stream; it does not wait."""
    text = " word" * body.max_tokens
    usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": body.max_tokens}
    content: dict[str, object] = {"text": text} if body.prompt is not None else {"message": {"content": text}}
    return {"choices": [{"index": 0, **content, "finish_reason": "length"}], "usage": usage}


def _prompt_tokens(body: _Body) -> int:
    """Words, plus one token for each message of a chat (as a template would add)."""
    if isinstance(body.prompt, str):
        return body.prompt.count(" ")
    if body.prompt is not None:
        return len(body.prompt)
    return sum(1 + message.get("content", "").count(" ") for message in body.messages)


async def serve(host: str, port: int, ttft_s: float, tpot_s: float, log: Path | None) -> None:
    """Serve until cancelled; prints ``http://HOST:PORT`` once it listens."""
    file = log.open("w") if log else None
    server = NullServer(ttft_s, tpot_s, file)
    listener = await asyncio.get_running_loop().create_server(lambda: _NullConnection(server), host, port, backlog=4096)
    print(f"http://{host}:{listener.sockets[0].getsockname()[1]}", flush=True)
    await server.run()


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(
        prog="python -m prism.trace.null_server", description="A streaming server without a model."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--tpot-ms", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    uvloop.run(serve(options.host, options.port, options.ttft_ms / 1000, options.tpot_ms / 1000, options.log))


if __name__ == "__main__":
    main()
