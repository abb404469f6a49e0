"""Layers of every family run in other engines: token for token, and their KV comes home with them."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prism.core.specs import ModelSpec
from prism.remote.orders import KvWay, RouteStop
from tests.engine.families import LATENT_ROWS, REPRESENTS, TRITON_ONLY, Family, make_model, named
from tests.engine.plain_families import EVERY_PLAIN
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.engine.test_remote_layers import _alone, lent_bytes
from tests.patience import happens

pytestmark = pytest.mark.engine
NEW = 6


async def answers(rig: Rig, engine: Any, asked: list[tuple[int, ...]], new: int) -> list[Any]:
    rids = [rig.submit(engine, tokenized("", each, new)) for each in asked]
    return [await rig.answer(rid) for rid in rids]


async def leads_and_goes_on_alone(rig: Rig, spec: ModelSpec, path: Path, like_hugging_face: bool) -> None:
    """An engine has the first layer, another one runs the rest; in the middle of answers it takes all of them over,
    with their KV."""
    config = json.loads((path / "config.json").read_text())
    pieces = int(config.get("num_hidden_layers") or config["n_layer"]) + 2
    devices = rig.devices if spec.tp > 1 else [rig.devices[0]]
    short, long = [prompt(1, 20), prompt(2, 50)], [prompt(3, 40), prompt(4, 33)]
    async with AsyncExitStack() as stack:
        whole = await rig.activate(spec, devices)
        stack.push_async_callback(whole.deactivate)
        expected = await answers(rig, whole, short, NEW), await answers(rig, whole, long, 4 * NEW)
        if like_hugging_face:
            assert expected[0] == [reference(path, each, NEW) for each in short]
        leader = await rig.activate(spec, rig.devices if spec.tp > 1 else [rig.devices[1]])
        stack.push_async_callback(leader.deactivate)
        for device in devices:
            rig.pool.memory[device].offer(0)
        await whole.remote.serve_layers(rig.folder / "layers")
        route = [RouteStop("", 0, 2), RouteStop(str(rig.folder / "layers"), 2, pieces - 1)]
        await leader.remote.set_route([*route, RouteStop("", pieces - 1, pieces)])
        await leader.remote.hold_pieces([0, 1, pieces - 1])
        assert await answers(rig, leader, short, NEW) == expected[0]
        assert lent_bytes(rig, 0) > 0
        rids = [rig.submit(leader, tokenized("", each, 4 * NEW)) for each in long]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in rids))
        await leader.remote.hold_pieces(range(pieces))
        await leader.remote.grow_route(KvWay.FETCH)
        assert [await rig.answer(rid) for rid in rids] == expected[1]
        await happens(lambda: _alone(leader), "it goes on alone")
        assert await answers(rig, leader, [long[0]], 4 * NEW) == [expected[1][0]], "from its prefix tree"
        await happens(lambda: leader.load and leader.load.kv_brought_tokens > 0, "KV was fetched")
    for i in range(2):
        await happens(lambda n=i: rig.free_bytes(n) == DEVICE_BYTES, "the books are exact")  # type: ignore[misc]


def ids(family: Family) -> str:
    return family.serves


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_PLAIN, ids=ids)
async def test_of_families_that_keep_k_and_v(rig: Rig, tmp_path: Path, family: Family) -> None:
    path = make_model(family, tmp_path / "m", rig.models / "demo-llama")
    await leads_and_goes_on_alone(rig, rig.spec_at(path, **family.engine), path, family.like_hugging_face)


SOME = [
    pytest.param(f, marks=() if f.name == REPRESENTS[LATENT_ROWS] else pytest.mark.slow)
    for f in TRITON_ONLY
    if f.name in (*REPRESENTS.values(), "GptOss", "MiniCPM3")
]


@pytest.mark.parametrize("family", SOME, ids=ids)
async def test_of_families_with_latents_or_windows(rig: Rig, tmp_path: Path, family: Family) -> None:
    path = make_model(family, tmp_path / "m", rig.models / "demo-llama")
    await leads_and_goes_on_alone(rig, rig.spec_at(path, **family.engine), path, family.like_hugging_face)


@pytest.mark.slow
async def test_latents_that_both_ranks_have(rig: Rig, tmp_path: Path) -> None:
    family = named(REPRESENTS[LATENT_ROWS])
    path = make_model(family, tmp_path / "m", rig.models / "demo-llama")
    await leads_and_goes_on_alone(rig, rig.spec_at(path, tp=2, **family.engine), path, family.like_hugging_face)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
async def test_kv_in_eight_bits(rig: Rig, tp: int) -> None:
    path = rig.models / "demo-llama"
    await leads_and_goes_on_alone(rig, rig.spec_at(path, tp=tp, kv_cache_dtype="fp8_e5m2"), path, False)
