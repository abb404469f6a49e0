"""Schemathesis over the OpenAPI document of a running server, the operators' calls included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

QUIET = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)


def load(document: dict[str, Any], models: Sequence[str]) -> Any:
    """The document as schemathesis has it. Most cases should get past the model's name and end soon, so it is one of
    ``models`` (some of which may not exist). ``document`` is changed."""
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        properties = document["components"]["schemas"][name]["properties"]
        properties["model"] = {"enum": list(models)}
    for path, operations in document["paths"].items():
        if "/models/{name}" in path:
            for operation in operations.values():
                operation["parameters"][0]["schema"] = {"type": "string", "enum": list(models)}
    return schemathesis.openapi.from_dict(document)


def fuzz(api: Any, http: httpx.Client, key: str) -> int:
    """Sends valid requests to every operation, and invalid ones where schemathesis finds them quickly (it needs minutes
    for the completions' large schemas); returns how many operations. Fails at a 5xx or at an error that is not OpenAI's
    object."""
    tried = 0
    for found in api.get_all_operations():
        operation = found.ok()
        _fuzz(operation, GenerationMode.POSITIVE, http, key)
        if operation.query or (operation.body and operation.path.startswith("/admin")):
            _fuzz(operation, GenerationMode.NEGATIVE, http, key)
        tried += 1
    return tried


def _fuzz(operation: Any, mode: GenerationMode, http: httpx.Client, key: str) -> None:
    @QUIET
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        _send(case, http, key)

    check()


def _send(case: Case, http: httpx.Client, key: str) -> None:
    options = case.as_transport_kwargs(base_url=str(http.base_url).rstrip("/"))
    headers = {**dict(options.get("headers") or {}), "authorization": f"Bearer {key}"}
    sent = {key: options[key] for key in ("params", "json", "data") if options.get(key) is not None}
    if "data" in sent:
        sent["content"] = sent.pop("data")
    try:
        answer = http.request(options["method"], options["url"], headers=headers, **sent)
    except (UnicodeEncodeError, ValueError, TypeError, httpx.InvalidURL, httpx.LocalProtocolError):
        return  # cannot be said in HTTP
    except httpx.TimeoutException as error:
        raise AssertionError(
            f"no answer: {error.request.method} {error.request.url} {error.request.content!r}"
        ) from error
    judge(answer, may_be_missing=case.path == "/readiness")


def judge(answer: httpx.Response, *, may_be_missing: bool = False) -> None:
    """No server error, and every error is OpenAI's object."""
    where = f"{answer.request.method} {answer.request.url} {answer.request.content[:500]!r}"
    assert answer.status_code < 500 or may_be_missing, f"{where}: {answer.text}"
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, where
