"""Layers of models that take images run in other engines: the images are looked at where the requests are."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prism.engine.errors import OrderRefused
from prism.remote.orders import KvWay, RouteStop
from prism.weights.store.weight_store import WeightStore
from tests.engine import test_images as gemma
from tests.engine.rig import DEVICE_BYTES, Rig
from tests.engine.slow_image import SlowImage
from tests.engine.test_image_families import (
    ASKED,
    TOKENIZER,
    make_llava,
    make_mistral3,
    make_qwen2_5_vl,
    make_qwen2_vl,
    make_qwen3_vl,
    reference,
)
from tests.engine.test_images import FrontSide
from tests.engine.test_remote_layers import _alone, lent_bytes
from tests.patience import happens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # transformers, of Qwen-VL
]
LONG = 48
"""Tokens of an answer whose layers come home meanwhile."""


def make_gemma(folder: Path, like: Path) -> None:
    folder.rmdir()
    gemma.make_model(folder, like)


def make(rig: Rig, folder: Path, of_family: Callable[[Path, Path], None]) -> tuple[Path, int]:
    """The model, and how many pieces it has."""
    like = rig.models / "demo-llama"
    path = folder / "vl"
    path.mkdir()
    if of_family is not make_gemma:
        for file in TOKENIZER:
            if (like / file).exists():
                shutil.copy(like / file, path)
    of_family(path, like)
    config = json.loads((path / "config.json").read_text())
    return path, int(config["text_config"]["num_hidden_layers"]) + 2


async def answers(rig: Rig, engine: Any, requests: Sequence[Any]) -> list[Any]:
    rids = [rig.submit(engine, request) for request in requests]
    return [await rig.answer(rid) for rid in rids]


async def asked(front: FrontSide, new: int | None = None) -> list[Any]:
    """With one image, with two, and with none."""
    requests = [await front.tokenized(text, *images) for text, *images in ASKED]
    for request in requests:
        request.sampling_params.max_new_tokens = new or request.sampling_params.max_new_tokens
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(
    "of_family", [make_gemma, make_qwen2_vl, make_qwen2_5_vl, make_qwen3_vl, make_llava, make_mistral3]
)
async def test_answers_to_images_over_layers_in_another_engine(
    rig: Rig, tmp_path: Path, of_family: Callable[[Path, Path], None]
) -> None:
    path, pieces = make(rig, tmp_path, of_family)
    front = FrontSide(path)
    refer = gemma.reference if of_family is make_gemma else reference
    hugging_face = [refer(path, text, *images) for text, *images in ASKED]
    spec, there = rig.spec_at(path, **front.engine_args), str(rig.folder / "layers")
    async with AsyncExitStack() as stack:
        whole = await rig.activate(spec, [rig.devices[0]])
        stack.push_async_callback(whole.deactivate)
        expected = await answers(rig, whole, await asked(front, LONG))
        leader = await rig.activate(spec, [rig.devices[1]])
        stack.push_async_callback(leader.deactivate)
        rig.pool.memory[rig.devices[0]].offer(0)
        await whole.remote.serve_layers(rig.folder / "layers")
        with pytest.raises(OrderRefused, match="embedded where its requests are"):
            await leader.remote.set_route([RouteStop(there, 0, pieces - 1), RouteStop("", pieces - 1, pieces)])
        between = [RouteStop("", 0, 1), RouteStop(there, 1, 2), RouteStop("", 2, pieces)]
        await leader.remote.set_route(between)
        assert await answers(rig, leader, await asked(front)) == hugging_face, "layers between its own"
        behind = [RouteStop("", 0, 2), RouteStop(there, 2, pieces - 1), RouteStop("", pieces - 1, pieces)]
        await leader.remote.set_route(behind)
        await leader.remote.hold_pieces([0, 1, pieces - 1])
        assert await answers(rig, leader, await asked(front)) == hugging_face, "layers behind its own"
        assert lent_bytes(rig, 0) > 0
        rids = [rig.submit(leader, request) for request in await asked(front, LONG)]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in rids))
        await leader.remote.hold_pieces(range(pieces))
        await leader.remote.grow_route(KvWay.FETCH)
        assert [await rig.answer(rid) for rid in rids] == expected
        await happens(lambda: _alone(leader), "it goes on alone")
        assert await answers(rig, leader, await asked(front, LONG)) == expected, "from its prefix tree"
    await the_books_are_exact(rig)


async def test_images_are_answered_while_weights_arrive(rig: Rig, tmp_path: Path) -> None:
    """With the embedding, what reads images, one layer and the head."""
    path, pieces = make(rig, tmp_path, make_gemma)
    front = FrontSide(path)
    spec = rig.spec_at(path, **front.engine_args)
    async with AsyncExitStack() as stack:
        whole = await rig.activate(spec, [rig.devices[0]])
        stack.push_async_callback(whole.deactivate)
        expected = await answers(rig, whole, await asked(front, LONG))
        image = SlowImage(WeightStore(rig.folder / "store"), path.name)
        stack.callback(image.close)
        assert image.layers + 2 == pieces
        first = [0, 1, pieces - 1]
        image.arrive(*first)
        leader = await rig.activate(spec, [rig.devices[1]], first_pieces=first)
        stack.push_async_callback(leader.deactivate)
        rig.pool.memory[rig.devices[0]].offer(0)
        await whole.remote.serve_layers(rig.folder / "layers")
        route = [RouteStop("", 0, 2), RouteStop(str(rig.folder / "layers"), 2, pieces - 1)]
        await leader.remote.set_route([*route, RouteStop("", pieces - 1, pieces)])
        await leader.remote.grow_route(KvWay.FETCH)
        assert await answers(rig, leader, await asked(front, LONG)) == expected
        assert not _alone(leader)
        image.arrive(*range(2, pieces - 1))
        await happens(lambda: _alone(leader), "it goes on alone")
        assert await answers(rig, leader, await asked(front, LONG)) == expected
    await the_books_are_exact(rig)


async def the_books_are_exact(rig: Rig) -> None:
    for i in range(2):
        await happens(lambda n=i: rig.free_bytes(n) == DEVICE_BYTES, "the books are exact")  # type: ignore[misc]
