"""LoRA adapters answer token for token what Hugging Face answers with the adapter merged into the weights, whatever
else the engine runs, wherever they run, and whoever was in their slot before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.config.adapters import adapter_mark, pool_bytes
from prism.config.catalog import load_catalog
from prism.core.specs import LoraRoom, ModelSpec
from prism.engine.handle import EngineHandle
from prism.wire.adapters import AdapterRef
from scripts.make_demo_adapter import make_adapter
from tests.engine.adapters import merged
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
BASE = "demo-llama"
NEW = 24
ROOM = LoraRoom(slots=2, max_rank=8, modules=("down_proj", "gate_up_proj", "o_proj", "qkv_proj"))
SHAPES: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "low": {"seed": 2, "rank": 4, "modules": ["q_proj", "v_proj"]},
    "keys": {"seed": 3, "modules": ["k_proj", "up_proj"]},
    "stable": {"seed": 4, "modules": ["o_proj", "down_proj"], "more": {"use_rslora": True}},
}


@pytest.fixture(scope="module")
def adapters(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with adapters of several kinds over the base, and the base merged with each (``NAME-merged``)."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, kind in SHAPES.items():
        make_adapter(demo_models / BASE, folder / name, **kind)
        merged(demo_models / BASE, folder / name, folder / f"{name}-merged")
    return folder


def request_of(adapters: Path, name: str, tokens: tuple[int, ...], rid: str = "") -> Any:
    """A request for the adapter ``name``; "": for the base."""
    made = tokenized(rid, tokens, NEW)
    if name:
        folder = adapters / name
        made.lora_id = AdapterRef(name, str(folder), adapter_mark(folder)).id
    return made


def spec_with_room(rig: Rig, room: LoraRoom | None = ROOM) -> ModelSpec:
    return replace(rig.spec(BASE), lora=room)


def expected(rig: Rig, adapters: Path, name: str, tokens: tuple[int, ...]) -> list[int]:
    folder = adapters / f"{name}-merged" if name else rig.models / BASE
    return reference(folder, tokens, NEW)


async def check(rig: Rig, handle: EngineHandle, adapters: Path, names: list[str], seed: int) -> None:
    """All at once, each equal to its own merged model."""
    p = prompt(seed)
    rids = [rig.submit(handle, request_of(adapters, name, p)) for name in names]
    for rid, name in zip(rids, names, strict=True):
        assert await rig.answer(rid) == expected(rig, adapters, name, p), name


async def test_adapters_beside_each_other_again_and_elsewhere(rig: Rig, adapters: Path) -> None:
    answers = {tuple(expected(rig, adapters, name, prompt(1))) for name in ("", *SHAPES)}
    assert len(answers) == 1 + len(SHAPES), "every adapter changes the answer"
    first = await rig.activate(spec_with_room(rig), [rig.devices[0]])
    # More adapters than slots, with one prompt: neither weights nor cached prefixes of one are used for another.
    await check(rig, first, adapters, ["", *SHAPES, "all", ""], 1)
    await check(rig, first, adapters, ["stable", "", "all"], 1)
    await happens(lambda: first.load and not first.load.running and first.load.adapters, "what is resident being told")
    assert first.load is not None
    assert len(first.load.adapters) <= ROOM.slots + 1
    assert first.info.weight_bytes >= pool_of(rig)
    first.forget_adapter("all")
    await check(rig, first, adapters, ["all", "low"], 2)
    await first.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    # The image of the base is the same with and without room for adapters.
    async with rig.engine(BASE) as plain:
        assert plain.info.from_image
        assert await rig.ask(plain, request_of(adapters, "", prompt(3))) == expected(rig, adapters, "", prompt(3))
        rid = rig.submit(plain, request_of(adapters, "all", prompt(3)))
        await rig.answer(rid)
        assert rig.finish[rid]["status_code"] == 503 and "unload the base once" in str(rig.finish[rid]["message"])
    second = await rig.activate(spec_with_room(rig), [rig.devices[1]])
    assert second.info.from_image
    await check(rig, second, adapters, ["keys", ""], 4)
    # A request that began elsewhere goes on behind its tokens, with its adapter.
    tokens = expected(rig, adapters, "low", prompt(5))
    resumed = request_of(adapters, "low", prompt(5), "carried")
    rig.submit(second, resumed, attempt=1, resumed=tokens[:9])
    assert await rig.answer("carried") == tokens
    await refusals(rig, second, adapters)
    await check(rig, second, adapters, ["all", ""], 6)
    await second.deactivate()
    assert rig.free_bytes(1) == DEVICE_BYTES


def pool_of(rig: Rig) -> int:
    """Bytes of the slots, by the base's dimensions."""
    file = rig.folder / "pool.yaml"
    file.write_text(f"models: [{{name: a, path: {rig.models / BASE}}}]")
    return pool_bytes(ROOM, load_catalog(file).spec("a").shape, 1)


async def refusals(rig: Rig, handle: EngineHandle, adapters: Path) -> None:
    """What an engine cannot run ends that request, and nothing else."""
    make_adapter(rig.models / BASE, adapters / "steep", rank=16, modules=["q_proj"])
    make_adapter(rig.models / "demo-qwen3", adapters / "foreign", modules=["q_proj"])
    make_adapter(rig.models / BASE, adapters / "dora", modules=["q_proj"], more={"use_dora": True})
    found = {}
    for name in ("steep", "foreign", "dora"):
        rid = rig.submit(handle, request_of(adapters, name, prompt(7)))
        await rig.answer(rid)
        assert rig.finish[rid]["status_code"] == 503
        found[name] = str(rig.finish[rid]["message"])
    assert "rank 16" in found["steep"] and "lora.max_rank" in found["steep"]
    assert "its base has 4" in found["foreign"]
    assert "use_dora" in found["dora"]
    broken = tokenized("", prompt(7), NEW)
    broken.lora_id = "nonsense"
    rid = rig.submit(handle, broken)
    await rig.answer(rid)
    assert rig.finish[rid]["status_code"] == 400


@pytest.mark.slow
async def test_a_hundred_adapters_through_two_slots(rig: Rig, adapters: Path, tmp_path: Path) -> None:
    """Every one is loaded, and those used longest ago are forgotten; the first is right again at the end."""
    names = [f"a{i}" for i in range(100)]
    for i, name in enumerate(names):
        make_adapter(rig.models / BASE, tmp_path / name, seed=100 + i, rank=4, modules=["q_proj", "v_proj"])
    for name in ("a0", "a57"):
        merged(rig.models / BASE, tmp_path / name, tmp_path / f"{name}-merged")
    handle = await rig.activate(spec_with_room(rig), [rig.devices[0]])
    rids = [rig.submit(handle, request_of(tmp_path, name, prompt(8))) for name in names]
    answers = {name: await rig.answer(rid) for name, rid in zip(names, rids, strict=True)}
    assert all(rig.finish[rid] == {"type": "length", "length": NEW} for rid in rids)
    assert len({tuple(answer) for answer in answers.values()}) > 90
    for name in ("a0", "a57"):
        assert answers[name] == expected(rig, tmp_path, name, prompt(8))
    await check(rig, handle, tmp_path, ["a0", ""], 8)
    await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


@pytest.mark.slow
async def test_adapters_over_two_devices(rig: Rig, adapters: Path) -> None:
    """Each rank has its part of the matrices."""
    handle = await rig.activate(replace(rig.spec(BASE, tp=2), lora=ROOM), list(rig.devices))
    await check(rig, handle, adapters, ["", *SHAPES], 9)
    await handle.deactivate()
