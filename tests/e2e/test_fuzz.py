"""Schemathesis over the OpenAPI document of the real server, operators' calls included: no 5xx, and it serves on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S

from ..server.fuzzing import fuzz, load
from .server import DEMOS, HTTP, Server, complete, greedy, until

pytestmark = pytest.mark.engine


def test_no_server_error(server: Server, demo_models: Path) -> None:
    key = (server.state / "admin.key").read_text().strip()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        # One model only: the devices do not hold all three pinned, and requests for the third would wait for long.
        fuzz(load(http.get("/openapi.json").json(), (DEMOS[0], "none")), http, key)
    server.admin(f"models/{DEMOS[0]}/unpin", {})
    until(lambda: HTTP.get(f"{server.url}/readiness").status_code == 200, "readiness")
    for model in DEMOS:
        assert complete(server.client, model, "still here", 8) == greedy(str(demo_models / model), "still here", 8)
