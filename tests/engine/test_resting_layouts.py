"""Models whose attention keeps more than K and V come back to a worker that keeps them built, like all others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.families import LATENT_ROWS, REPRESENTS, WINDOWS, make_model, named
from tests.engine.rig import DEVICE_BYTES, Rig, opened, prompt, reference, tokenized

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NEW = 6


@pytest.fixture
async def single(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """One worker on each device, so that models follow each other in it."""
    async with opened(zygote, demo_models, max_per_device=1) as rig:
        yield rig


@pytest.mark.parametrize("layout", [LATENT_ROWS, WINDOWS])
async def test_what_comes_back_to_its_worker_is_not_built_again(single: Rig, tmp_path: Path, layout: str) -> None:
    family = named(REPRESENTS[layout])
    path = make_model(family, tmp_path / "model", single.models / "demo-llama")
    woken = []
    for turn in range(4):
        handle = await single.activate(single.spec_at(path, **family.engine), [single.devices[0]])
        woken.append("wake" in handle.phases)
        asked = prompt(30 + turn, 40)
        assert await single.ask(handle, tokenized("", asked, NEW)) == reference(path, asked, NEW)
        await handle.deactivate()
        assert single.free_bytes() == DEVICE_BYTES, "what is kept has no memory"
        async with single.engine("demo-llama") as between:
            assert await single.ask(between, tokenized("", prompt(turn), NEW)) == single.reference(
                "demo-llama", prompt(turn), NEW
            )
    assert woken == [False, False, True, True]  # the first time there is no image
