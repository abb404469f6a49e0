"""Families whose parameters are unlike a Llama's: equal to Hugging Face when loaded, and again from their image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.families import FAMILIES, PLAIN, TRITON_ONLY, make_model, named
from tests.engine.rig import Rig, prompt, reference, tokenized

pytestmark = pytest.mark.engine
NEW = 24


async def answer(rig: Rig, path: Path, asked: tuple[int, ...], from_image: bool, **engine_args: Any) -> list[int]:
    handle = await rig.activate(rig.spec_at(path, **engine_args), [rig.devices[0]])
    try:
        assert handle.info.from_image is from_image
        return await rig.ask(handle, tokenized("", asked, NEW))
    finally:
        await handle.deactivate()


@pytest.fixture
def make(rig: Rig, tmp_path: Path) -> Callable[[str], Path]:
    return lambda config: make_model(named(config), tmp_path / config.lower(), rig.models / "demo-llama")


@pytest.mark.parametrize("config", [f.config for f in FAMILIES if f.layout == PLAIN and f not in TRITON_ONLY])
async def test_equal_at_first_and_from_the_image(rig: Rig, make: Callable[[str], Path], config: str) -> None:
    path, asked = make(config), prompt(3)
    expected = reference(path, asked, NEW)
    assert await answer(rig, path, asked, from_image=False) == expected
    assert await answer(rig, path, asked, from_image=True) == expected


async def test_overrides_of_the_configuration_have_an_image_of_their_own(rig: Rig) -> None:
    path, asked = rig.models / "demo-llama", prompt(4)
    fewer = {"json_model_override_args": json.dumps({"num_hidden_layers": 2})}
    whole = await answer(rig, path, asked, from_image=False)
    half = await answer(rig, path, asked, from_image=False, **fewer)
    assert half != whole == reference(path, asked, NEW)
    assert await answer(rig, path, asked, from_image=True, **fewer) == half
    assert await answer(rig, path, asked, from_image=True) == whole
