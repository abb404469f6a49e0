"""What engine tests wait with: an engine that is over fails its test soon, with its words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import rig as rigs
from tests.engine.rig import Rig


@pytest.fixture
async def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """A rig whose pool was never started."""
    monkeypatch.setattr(rigs, "_UNDER_WAY_S", 0.05)
    rig = Rig(tmp_path, tmp_path, tmp_path / "zygote.sock")
    yield rig
    rig.inbox.close()


def engine(**state: Any) -> Any:
    words = "worker w1 (pid 5) failed: KeyError: model.layers.0"
    return SimpleNamespace(**{"id": "a@w1-1", "alive": False, "ended": words, **state})


async def test_an_engine_that_is_over_fails_its_request_with_its_words(idle: Rig) -> None:
    idle._engines["r"] = engine()
    with pytest.raises(AssertionError, match=r"a@w1-1 ended before it had answered r: .*KeyError: model\.layers"):
        await idle.answer("r")


async def test_one_that_ends_while_it_is_waited_for_does_so_too(idle: Rig) -> None:
    idle._engines["r"] = found = engine(alive=True)
    asyncio.get_running_loop().call_later(0.01, lambda: setattr(found, "alive", False))
    with pytest.raises(AssertionError, match="KeyError"):
        await idle.answer("r")


async def test_what_it_sent_before_its_end_counts(idle: Rig) -> None:
    idle._engines["r"] = engine()
    idle.tokens["r"] = [4, 5]
    assert await idle.wait_tokens("r", 2) == [4, 5]
