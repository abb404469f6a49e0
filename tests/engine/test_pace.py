"""Engines on devices whose speed is declared: answers as ever, and each device is charged for the layers it ran."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from prism.core.pace import DevicePace
from prism.core.specs import Speculation, SpeculativeAlgorithm
from prism.engine.errors import CannotActivate
from prism.engine.handle import EngineHandle
from prism.remote.orders import RouteStop
from tests.engine.rig import Rig, opened, prompt, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
NEW = 12
LAYER_S = 0.002
LAYERS = 4


@pytest.fixture
async def paced(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    async with opened(zygote, demo_models, pace=DevicePace(layer_s=LAYER_S)) as rig:
        yield rig


async def charged(handle: EngineHandle, layers: int, *, spared: int = 0) -> None:
    """Its device ran so many layers, once for each batch; up to ``spared`` of them less."""

    def found() -> bool:
        if handle.load is None:
            return False
        least, most = (layers - spared) * LAYER_S - 6e-4, layers * LAYER_S + 6e-4
        return least <= handle.load.paced_s <= most

    await happens(found, f"{layers} layers of {LAYER_S} s")


async def led(leader: EngineHandle, layers: int) -> int:
    """Its device ran so many layers, and those that it ran while its peer had not answered yet; how many these were."""

    def ahead() -> int | None:
        load = leader.load
        if load is None or load.remote is None:
            return None
        ran = load.remote.run_ahead
        return ran if load.paced_s == pytest.approx((layers + ran) * LAYER_S, abs=6e-4) else None

    await happens(lambda: ahead() is not None, f"{layers} layers of {LAYER_S} s, and those that were run ahead")
    return ahead() or 0


async def test_answers_are_the_same_and_every_step_is_charged(paced: Rig) -> None:
    async with paced.engine("demo-llama") as handle:
        asked = prompt(3, 40)
        answer = await paced.ask(handle, tokenized("", asked, NEW))
        assert answer == paced.reference("demo-llama", asked, NEW)
        await charged(handle, NEW * LAYERS)
    async with paced.engine("demo-llama") as handle:  # what was built is kept, and paced once
        assert await paced.ask(handle, tokenized("", asked, NEW)) == answer
        await charged(handle, 2 * NEW * LAYERS)


async def test_layers_in_another_engine_are_charged_to_its_device(paced: Rig) -> None:
    async with AsyncExitStack() as stack:
        whole, leader = [await paced.activate(paced.spec("demo-llama"), [device]) for device in paced.devices]
        for handle in (whole, leader):
            stack.push_async_callback(handle.deactivate)
        path = paced.folder / "whole.layers"
        paced.pool.memory[paced.devices[0]].offer(0)
        await whole.remote.serve_layers(path)
        await leader.remote.set_route([RouteStop("", 0, 2), RouteStop(str(path), 2, 5), RouteStop("", 5, 6)])
        asked = prompt(4, 40)
        assert await paced.ask(leader, tokenized("", asked, NEW)) == paced.reference("demo-llama", asked, NEW)
        ahead = await led(leader, NEW)
        await charged(whole, NEW * (LAYERS - 1), spared=ahead)
        asked = prompt(5, 300)  # in parts, each of which reads the weights
        assert await paced.ask(leader, tokenized("", asked, 1)) == paced.reference("demo-llama", asked, 1)
        parts = await happens(lambda: leader.load and leader.load.remote and leader.load.remote.parts, "parts")
        ahead = await led(leader, NEW + parts)
        await charged(whole, (NEW + parts) * (LAYERS - 1), spared=ahead)


async def test_a_model_that_guesses_has_no_declared_time(paced: Rig) -> None:
    guesses = Speculation(SpeculativeAlgorithm.NGRAM, draft_tokens=4, ngrams=1 << 14)
    spec = replace(paced.spec("demo-llama"), speculation=guesses)
    with pytest.raises(CannotActivate, match="no speculation on paced devices"):
        await paced.activate(spec, [paced.devices[0]])
