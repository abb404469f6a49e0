"""Input that somebody made up to do harm costs its sender an error and nobody else anything."""

from __future__ import annotations

import json
import logging
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from prism.core.ids import ModelName
from prism.obs import names
from prism.obs.logs import ConsoleFormatter, setup_logging
from prism.obs.metrics import render
from prism.server import connections, http
from prism.server.errors import ApiError
from prism.server.origins import check_site
from tests.patience import PATIENCE_S
from tests.server.live import ADMIN_KEY, LiveFront

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "fast", "prompt": "hi", "max_tokens": 2}


def is_well(live: LiveFront) -> bool:
    return live.http.post(TEXT, json=HELLO).status_code == 200


def nested(depth: int) -> str:
    """JSON text; Python's own encoder would not go so deep."""
    return '{"a": ' * depth + '{"type": "object"}' + "}" * depth


@pytest.mark.parametrize("depth", [50, 200, 500, 1000])
@pytest.mark.parametrize(
    "field",
    ["chat_template_kwargs", "tools", "response_format", "logit_bias", "metadata", "messages", "stop", "tool_calls"],
)
def test_deep_json_is_the_senders_problem(live: LiveFront, field: str, depth: int) -> None:
    deep = nested(depth)
    message = '{"role": "user", "content": "x"}'
    match field:
        case "tools":
            more = f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
        case "response_format":
            more = f'"{field}": {{"type": "json_schema", "json_schema": {{"name": "n", "schema": {deep}}}}}'
        case "messages":
            more, message = '"n": 1', f'{{"role": "user", "content": [{deep}]}}'
        case "tool_calls":
            call = f'{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {json.dumps(deep)}}}}}'
            more, message = '"n": 1', f'{message}, {{"role": "assistant", "content": null, "tool_calls": [{call}]}}'
        case _:
            more = f'"{field}": {deep}'
    body = f'{{"model": "fast", "messages": [{message}], "max_tokens": 1, {more}}}'
    answer = live.http.post(CHAT, content=body)
    assert answer.status_code in (200, 400), answer.text[:300]
    assert is_well(live)


def raw(live: LiveFront) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(live.socket)
    except OSError:
        connection.close()
        raise
    return connection


def read(connection: socket.socket, until: bytes = b"") -> bytes:
    """What comes until ``until`` has come, or, without it, to the end of the connection."""
    data = b""
    while (not until or until not in data) and (more := connection.recv(10_000)):
        data += more
    return data


def test_a_hundred_megabytes_are_refused_before_they_are_sent(live: LiveFront) -> None:
    with raw(live) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n")
        answer = read(connection, b"}}")
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer
    assert is_well(live)


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", b"G"])
def test_slow_headers_end_with_their_connection(live: LiveFront, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    with raw(live) as connection:
        connection.sendall(start)
        assert connection.recv(100) == b""
    assert is_well(live)


def test_a_further_request_on_a_connection_is_bounded_too(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    with raw(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read(connection, b"}").startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\nX-")
        assert read(connection) == b""


def test_a_body_that_stops_coming_is_given_up(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SILENCE_S", 0.2)
    with raw(live) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = read(connection, b"}}")
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
    assert is_well(live)


def test_five_thousand_idle_connections_keep_nobody_out(live: LiveFront) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 5_000
    if hard < 2 * wanted + 1_000:
        pytest.skip("needs 11,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * wanted + 1_000), hard))
    idle = []
    try:
        while len(idle) < wanted:
            try:
                idle.append(raw(live))
            except BlockingIOError:  # so many connect at once that the server's backlog is full
                assert is_well(live)
        assert is_well(live)
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert is_well(live)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"model": "fast", "prompt": "y" * 900_000}),
        (TEXT, {"model": "fast", "prompt": ["y" * 9_000] * 100}),
        (CHAT, {"model": "fast", "messages": [{"role": "user", "content": "y" * 900_000}]}),
    ],
    ids=["text", "many texts", "chat"],
)
def test_others_are_answered_while_a_long_prompt_is_tokenised(
    live: LiveFront, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    served = live.run(live.front.models.get(ModelName("fast")))
    begun, go_on = threading.Event(), threading.Event()
    tokenizer = type(served.manager.tokenizer)
    original = tokenizer._encode_plus

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        if "y" * 100 in str(args)[:10_000] + str(options)[:10_000]:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return original(self, *args, **options)

    monkeypatch.setattr(tokenizer, "_encode_plus", slow)
    with ThreadPoolExecutor() as pool, live.connect() as other:
        asked = pool.submit(other.post, path, json=body)
        assert begun.wait(PATIENCE_S)
        assert live.http.get("/health").status_code == 200
        assert is_well(live)
        go_on.set()
        assert asked.result().status_code == 400


def test_millions_of_token_ids_are_counted_and_not_looked_at(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest

    monkeypatch.setattr(CompletionRequest, "model_validate", lambda data: pytest.fail("looked at"))
    for prompt in ([1] * 300_000, [[1], [1] * 300_000]):
        answer = live.http.post(TEXT, json={"model": "fast", "prompt": prompt})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_made_up_names_do_not_become_label_values(live: LiveFront) -> None:
    evil = 'x"} 1\nprism_evil{a="'
    live.http.post(TEXT, json={**HELLO, "model": evil})
    live.http.get("/" + "nowhere" * 10)
    live.http.request("PROPFIND", "/health")
    live.http.get("/health", headers={"x-client-request-id": evil.replace("\n", " ")})
    text = render(live.front.metrics).decode()
    assert "prism_evil" not in text and "nowhere" not in text and "PROPFIND" not in text
    assert f'{names.HTTP.name}{{method="other"' in text


def test_made_up_lines_do_not_enter_a_log(live: LiveFront, tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        setup_logging("front-0", "info", tmp_path / "x.jsonl", console=None, prompts=True)
        evil = 'a\n{"level": "error", "msg": "forged"}\x1b[2J'
        live.http.post(TEXT, json={**HELLO, "model": evil, "user": evil})
        lines = (tmp_path / "x.jsonl").read_text().splitlines()
        assert all(json.loads(line)["process"] == "front-0" for line in lines)
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
    shown = ConsoleFormatter("x").format(logging.makeLogRecord({"msg": "model %s", "args": ("\x1b[2J\r",)}))
    assert "\x1b" not in shown and "\r" not in shown


# --- web pages of other sites ---

LOOPBACK = ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("headers", "server", "allowed"),
    [
        ({"host": "127.0.0.1:8000"}, LOOPBACK, ()),
        ({"host": "localhost:8000"}, LOOPBACK, ()),
        ({"host": "[::1]:8000"}, ("::1", 8000), ()),
        ({"host": "gpu-box:8000"}, ("10.0.0.5", 8000), ()),
        ({"host": "anything"}, ("/run/prism.sock", None), ()),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, LOOPBACK, ()),
        ({"host": "127.0.0.1:8000", "origin": "https://ops.example"}, LOOPBACK, ("https://ops.example",)),
        ({"host": "ops.example"}, LOOPBACK, ("https://ops.example",)),
    ],
)
def test_tools_and_allowed_pages_may_call(headers: dict[str, str], server: Any, allowed: tuple[str, ...]) -> None:
    check_site(Headers(headers), server, allowed)


@pytest.mark.parametrize(
    ("headers", "server"),
    [
        ({"host": "127.0.0.1:8000", "origin": "https://evil.example"}, LOOPBACK),
        ({"host": "127.0.0.1:8000", "origin": "null"}, LOOPBACK),
        ({"host": "gpu-box:8000", "origin": "http://gpu-box"}, ("10.0.0.5", 8000)),
        ({"host": "evil.example:8000"}, LOOPBACK),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, LOOPBACK),
        ({"host": ""}, LOOPBACK),
        ({"host": "127.0.0.1.evil.example"}, LOOPBACK),
    ],
)
def test_pages_of_other_sites_may_not(headers: dict[str, str], server: Any) -> None:
    with pytest.raises(ApiError) as refused:
        check_site(Headers(headers), server, ())
    assert (refused.value.status, refused.value.code) == (403, "forbidden")


def test_the_admin_calls_ask(live: LiveFront) -> None:
    auth = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert live.http.get("/admin/models", headers=auth).status_code == 200
    assert live.http.get("/admin/models", headers={**auth, "origin": "https://evil.example"}).status_code == 403
    assert live.http.post("/admin/reload", headers={"origin": "https://evil.example"}).status_code == 403
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in live.http.options("/admin/reload", headers=preflight).headers


def test_keys_are_compared_in_constant_time(live: LiveFront, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[object, object]] = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    for key in (ADMIN_KEY, "wrong", "ключ"):
        live.http.get("/admin/models", headers={"authorization": f"Bearer {key}".encode()})
    assert len(compared) >= 3
