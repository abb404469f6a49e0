"""A server that answers the admin API from a table, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from prism.cli import client
from prism.cli.main import main

Answer = dict[str, Any] | tuple[int, Any]


@dataclass
class FakeServer:
    """``answers`` maps ``METHOD path`` to a body, or to (status, body). ``calls`` has what was asked."""

    answers: dict[str, Answer] = field(default_factory=lambda: {"GET /admin/devices": {"devices": []}})
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def handle(self, request: httpx.Request) -> httpx.Response:
        what = f"{request.method} {request.url.raw_path.decode().partition('?')[0]}"
        self.calls.append((what, json.loads(request.content or b"{}")))
        self.keys.append(request.headers.get("authorization", ""))
        answer = self.answers.get(what, (404, {"error": {"message": f"no answer for {what}"}}))
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, content=body) if isinstance(body, bytes) else httpx.Response(status, json=body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    transport = httpx.MockTransport(fake.handle)

    def connect(url: str | None, key: str | None, state_dir: str | None) -> client.AdminClient:
        return client.AdminClient(url or "http://server", key, transport=transport)

    monkeypatch.setattr(client, "connect", connect)
    return fake


@pytest.fixture
def prism() -> Callable[..., Result]:
    """Run ``prism ARGUMENTS`` in this process."""

    def run(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, list(arguments), **options)

    return run


MODEL: dict[str, Any] = {
    "name": "org/chat",
    "aliases": ["chat"],
    "path": "/models/chat",
    "state": "ready",
    "pinned": True,
    "tp": 1,
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
    "context_tokens": 4096,
    "weight_bytes": 3 << 30,
    "kv_bytes": 256 << 20,
    "running": 2,
    "waiting": 1,
    "ttft_attainment": 0.975,
    "tpot_attainment": None,
    "last_used_s": 1.0,
    "rate_per_s": 1.25,
    "failure": "",
    "replicas": [
        {
            "devices": ["local/host:0"],
            "state": "ready",
            "generation": 4,
            "reason": "demand",
            "since_s": 1.0,
            "weight_bytes": 3 << 30,
            "kv_bytes": 256 << 20,
            "borrowed_bytes": 48 << 20,
            "long_host_bytes": 40 << 20,
            "long_lent_bytes": 8 << 20,
            "running": 2,
            "waiting": 1,
        }
    ],
}
COLD: dict[str, Any] = {
    **MODEL,
    "name": "cold",
    "state": "inactive",
    "pinned": False,
    "replicas": [],
    "running": 0,
    "waiting": 0,
}
DEVICE: dict[str, Any] = {
    "id": "local/host:0",
    "node": "local",
    "kind": "host",
    "capacity_bytes": 4 << 30,
    "free_bytes": 768 << 20,
    "weight_bytes": 3 << 30,
    "kv_bytes": 256 << 20,
    "draining": False,
    "engines": {"parked": 1, "active": 1, "starting": 0},
    "kvpr": 0.1,
}
