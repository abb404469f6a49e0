"""With ``log.prompts: false`` no word of what was said is in the logs, SGLang's own lines included."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.obs.foreign import show_prompts
from prism.obs.logs import setup_logging
from tests.patience import until
from tests.server.live import LiveFront

SECRET = "xylophone"
BROKEN_CALL = f'<tool_call>\n{{"name": "f", "arguments": {{"{SECRET}": nonsense]}}}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    setup_logging("front-0", "info", tmp_path / "front.jsonl", console=None, prompts=False)
    yield tmp_path / "front.jsonl"
    ours = [handler for handler in root.handlers if handler not in handlers]
    root.handlers[:] = handlers
    root.setLevel(level)
    for handler in ours:
        handler.close()


def written(log_file: Path, request_id: str) -> bool:
    """Whether a request's line is there: the last one of it, after its answer is out, which is when this thread may
    already be here. What is written to a file that was closed meanwhile opens it again, for nobody to close."""
    lines = [line for line in log_file.read_text().splitlines() if "prism.access" in line]
    return any(request_id in line for line in lines)


def ask(live: LiveFront, log_file: Path, **more: object) -> str:
    body = {"model": "org/thinker:7b", "messages": [{"role": "user", "content": SECRET}], "tools": TOOLS, **more}
    with live.answering("org/thinker:7b", BROKEN_CALL):
        response = live.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    request_id = response.headers["x-request-id"]
    until(lambda: written(log_file, request_id), "the line of the access")
    return request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_parser_error_shows_no_model_output(live: LiveFront, log_file: Path, stream: bool) -> None:
    request_id = ask(live, log_file, stream=stream)
    text = log_file.read_text()
    assert SECRET not in text
    told = [line for line in map(json.loads, text.splitlines()) if "tool parser" in line["msg"]]
    assert told and {line["request_id"] for line in told} == {request_id}
    assert len({line["msg"] for line in told}) == len(told), "one line per kind of event"
    show_prompts(True)
    ask(live, log_file, stream=False)
    assert SECRET in log_file.read_text()


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": SECRET, "schema": {"type": SECRET}}}},
        {"stop": [SECRET] * 50},
        {SECRET: 1},
        {"model": SECRET},
        {"messages": [{"role": SECRET, "content": SECRET}]},
        {"tools": [{"type": "function", "function": {"name": SECRET, "parameters": {"type": SECRET}}}]},
        {"temperature": SECRET},
    ],
    ids=lambda f: next(iter(f)),
)
def test_refused_requests_leave_no_word_of_theirs(live: LiveFront, log_file: Path, field: dict[str, object]) -> None:
    body = {"model": "fast", "messages": [{"role": "user", "content": SECRET}], **field}
    response = live.http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 400, 404)
    until(lambda: written(log_file, response.headers["x-request-id"]), "the line of the access")
    assert SECRET not in log_file.read_text()
