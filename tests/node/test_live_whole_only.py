"""Instances that were to serve early, of models whose engines cannot: whole, at once, and with the reason told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prism.core.settings import LiveMode
from prism.core.specs import LoraRoom

from .conftest import Bench
from .live_node import FIRST, MODEL, SECOND, THIRD, LiveNode, opened


@pytest.fixture
async def node(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveNode]:
    async with opened(bench, tmp_path, monkeypatch) as made:
        yield made


async def test_a_model_that_cannot_run_apart_is_said_to_be_one_and_its_engines_are_asked_once(node: LiveNode) -> None:
    first = await node.activate(FIRST, LiveMode.PAIR)
    first.remote.refuses, first.remote.whole_only = "SGLang runs it as a whole only", True
    for key in (SECOND, THIRD):
        result = await node.instances.command(node.order(key, LiveMode.PAIR))
        assert (result.early, result.whole_only) == (False, "SGLang runs it as a whole only")
        assert not node.handle(key).began_with
        first.remote.refuses = ""  # and is not asked again


async def test_a_model_that_is_known_to_come_whole_asks_nobody(node: LiveNode) -> None:
    first = await node.activate(FIRST, LiveMode.PAIR)
    order = node.order(SECOND, LiveMode.PAIR)
    order = msgspec.structs.replace(order, spec=replace(MODEL, lora=LoraRoom(1, 8, ("qkv_proj",))))
    assert (await node.instances.command(order)).ok
    assert not node.handle(SECOND).began_with and first.remote.served_at is None
