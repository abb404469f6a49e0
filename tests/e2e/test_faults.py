"""What clients and catalogs get wrong, and loads that are too much: a clear error for them, service for the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from .server import DEMOS, HTTP, Server, complete, greedy, stream, until

pytestmark = pytest.mark.engine
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def server(peculiar: Server) -> Server:
    return peculiar


def other_models_serve(server: Server, demo_models: Path) -> None:
    assert complete(server.client, DEMOS[1], "still here", 8) == greedy(str(demo_models / DEMOS[1]), "still here", 8)


@pytest.mark.parametrize("model", ["corrupt", "missing", "large", "nowhere"])
def test_a_model_that_cannot_run_says_why_and_harms_nobody(server: Server, demo_models: Path, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        complete(server.client, model, "hello", 4)
    assert error.value.status_code == 503
    assert model in error.value.message and error.value.code
    other_models_serve(server, demo_models)


def test_an_unknown_model_gets_names_that_resemble_it(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        complete(server.client, "demo-lama", "hello", 4)
    assert error.value.code == "model_not_found" and "demo-llama" in error.value.message


def test_a_prompt_longer_than_the_context_is_the_callers_fault(server: Server, demo_models: Path) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(server.client, DEMOS[0], "word " * 20_000, 4)
    assert error.value.code == "context_length_exceeded"
    other_models_serve(server, demo_models)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"model": "demo-llama"}',
        b'{"model": "demo-llama", "prompt": "x", "max_tokens": "many"}',
        b'{"model": "demo-llama", "prompt": "x", "temperature": -1}',
        b'{"model": "demo-llama", "prompt": "x", "n": 0}',
        b'{"model": 7, "prompt": "x"}',
    ],
)
def test_malformed_requests_get_400_with_an_error_object(server: Server, body: bytes) -> None:
    answer = HTTP.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_bad_grammar_fails_its_request_only(server: Server, demo_models: Path) -> None:
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "no-such-type"}}}}
    with pytest.raises(openai.APIStatusError) as error:
        server.client.chat.completions.create(
            model=DEMOS[1],
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[arg-type]
        )
    assert (error.value.status_code, error.value.param) == (400, "response_format")
    assert "no-such-type" in error.value.message
    assert ".cc" not in error.value.message, "where in a library's sources it was found"
    other_models_serve(server, demo_models)


def test_structured_output_is_what_the_schema_says(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    answer = server.client.chat.completions.create(
        model=DEMOS[1],
        messages=[{"role": "user", "content": "x"}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},  # type: ignore[arg-type]
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


async def test_clients_that_go_away_leave_nothing_running(server: Server) -> None:
    tasks = []
    async with server.async_client() as client:
        for i in range(6):
            begun = asyncio.Event()
            ask = stream(client, DEMOS[i % 3], f"endless {i}", 400, lambda count, e=begun: e.set())  # type: ignore[misc]
            tasks.append(asyncio.create_task(ask))
            await begun.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(until, lambda: not server.admin("requests")["requests"], "nothing being open")


async def test_a_burst_is_answered_to_the_last(server: Server) -> None:
    """300 at once over three models on two devices; the 10,000 of the soak test are in their own target."""
    async with server.async_client() as client:
        answers = await asyncio.gather(*(stream(client, DEMOS[i % 3], f"burst {i}", 4) for i in range(300)))
    assert len(answers) == 300
