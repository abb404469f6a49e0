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
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def ask(live: LiveFront, **more: object) -> str:
    body = {"model": "org/thinker:7b", "messages": [{"role": "user", "content": SECRET}], "tools": TOOLS, **more}
    with live.answering("org/thinker:7b", BROKEN_CALL):
        response = live.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_parser_error_shows_no_model_output(live: LiveFront, log_file: Path, stream: bool) -> None:
    request_id = ask(live, stream=stream)
    text = log_file.read_text()
    assert SECRET not in text
    told = [line for line in map(json.loads, text.splitlines()) if "tool parser" in line["msg"]]
    assert told and {line["request_id"] for line in told} == {request_id}
    assert len({line["msg"] for line in told}) == len(told), "one line per kind of event"
    show_prompts(True)
    ask(live, stream=False)
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
    # The line of an access is written after its answer is out, which is when this thread may already be here.
    until(lambda: "prism.access" in log_file.read_text(), "the line of the access")
    assert SECRET not in log_file.read_text()
