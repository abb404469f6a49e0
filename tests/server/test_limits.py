"""Keys and their limits, over the in-memory store with a settable clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from prism.config.catalog import Catalog, load_catalog
from prism.server import auth
from prism.server.auth import Gate
from prism.server.errors import ApiError
from prism.store.memory import MemoryStore

CATALOG = """
devices: [{id: "host:0", memory: 1GiB}]
models: [{name: one, path: x}, {name: two, path: y, aliases: [zwei]}]
keys:
  - {name: small, key: secret-small, requests_per_minute: 2, tokens_per_minute: 100, models: [on*]}
  - {name: boss, key: secret-boss, admin: true}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    file = tmp_path / "c.yaml"
    file.write_text(CATALOG)
    return load_catalog(file)


@pytest.fixture
def gate(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Gate:
    clock = [1000.0]
    monkeypatch.setattr(auth, "time", SimpleNamespace(time=lambda: clock[0]))  # not for other threads
    made = Gate(catalog, MemoryStore(), "state-admin-key")
    made.clock = clock  # type: ignore[attr-defined]
    return made


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_who_may_call(gate: Gate) -> None:
    assert gate.caller(bearer("secret-small")).name == "small"
    assert gate.caller(Headers({"x-api-key": "secret-boss"})).name == "boss"
    for headers in (Headers({}), bearer("wrong"), Headers({"authorization": "Basic secret-small"})):
        with pytest.raises(ApiError) as refused:
            gate.caller(headers)
        assert refused.value.status == 401
    assert gate.admin(bearer("secret-boss")).name == "boss"
    assert gate.admin(bearer("state-admin-key")).key is None
    with pytest.raises(ApiError) as forbidden:
        gate.admin(bearer("secret-small"))
    assert forbidden.value.status == 403


def test_models_of_a_key(gate: Gate) -> None:
    small = gate.caller(bearer("secret-small"))
    gate.check_model(small, "one")
    with pytest.raises(ApiError) as refused:
        gate.check_model(small, "two")
    assert (refused.value.status, refused.value.param) == (403, "model")


async def test_requests_per_minute(gate: Gate) -> None:
    for remaining in (1, 0):
        caller = gate.caller(bearer("secret-small"))
        await gate.admit(caller, 10)
        assert caller.headers["x-ratelimit-remaining-requests"] == str(remaining)
    caller = gate.caller(bearer("secret-small"))
    with pytest.raises(ApiError) as refused:
        await gate.admit(caller, 10)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after_s == pytest.approx(30.0)
    assert caller.headers["x-ratelimit-remaining-tokens"] == "70", "the refused request's tokens were given back below"
    gate.clock[0] += 30  # type: ignore[attr-defined]
    await gate.admit(gate.caller(bearer("secret-small")), 10)


async def test_tokens_per_minute_are_settled(gate: Gate) -> None:
    caller = gate.caller(bearer("secret-small"))
    await gate.admit(caller, 90)
    refused = gate.caller(bearer("secret-small"))
    with pytest.raises(ApiError):
        await gate.admit(refused, 50)
    gate.settle(caller, 60)
    await asyncio.gather(*gate._returning)
    again = gate.caller(bearer("secret-small"))
    await gate.admit(again, 50)
    assert again.headers["x-ratelimit-remaining-tokens"] == "20"


async def test_a_key_without_limits_has_no_headers(gate: Gate) -> None:
    boss = gate.caller(bearer("secret-boss"))
    await gate.admit(boss, 10**9)
    assert boss.headers == {}
