"""What a newcomer, a probe and a stock client look for first."""

from __future__ import annotations

import pytest

from prism.server.models import Models
from tests.server.live import LiveFront
from tests.server.tiny import CONTEXT


def test_the_root_says_where_things_are(live: LiveFront) -> None:
    places = live.http.get("/").json()
    assert places["api"] == "/v1" and places["version"]
    for name in ("models", "openapi", "health", "readiness", "metrics"):
        assert live.http.get(places[name]).status_code == 200, name
    assert live.http.get(places["admin"]).status_code == 401


@pytest.mark.parametrize("path", ["/", "/health", "/readiness"])
def test_probes_may_use_head(live: LiveFront, path: str) -> None:
    answer = live.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_needs_scripts_from_elsewhere(live: LiveFront, path: str) -> None:
    answer = live.http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "GET /" in answer.json()["error"]["message"]


def test_models_have_what_stock_servers_tell_before_they_were_used(live: LiveFront) -> None:
    data = live.http.get("/v1/models").json()["data"]
    for model in data:
        expected = None if model["id"] == "broken" else CONTEXT
        assert model["context_length"] == model["max_model_len"] == expected
        assert (model["root"], model["parent"]) == (model["id"], None)
    assert live.http.get("/v1/models/cold").json()["max_model_len"] == CONTEXT


async def test_context_lengths_survive_a_reload(live: LiveFront) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is built for it")

    models = Models(live.catalog, never)  # type: ignore[arg-type]
    await models.learn(live.catalog.models)
    models.reload(live.catalog)
    await models.learn(live.catalog.models)
    assert models.context_tokens("cold") == CONTEXT  # type: ignore[arg-type]
