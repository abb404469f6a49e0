"""Models that come back to a worker which keeps them built: the same answers, no memory held meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism.core.ids import DeviceId
from prism.engine.commands import build_name
from prism.engine.link import WorkerLink
from prism.engine.parking import ParkedTeams
from tests.engine.rig import DEVICE_BYTES, MODELS, Rig, opened, prompt, tokenized

NEW = 12
engine = pytest.mark.engine


async def check(rig: Rig, handle: object, name: str, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        p = prompt(seed, 60)
        assert await rig.ask(handle, tokenized("", p, NEW)) == rig.reference(name, p, NEW)  # type: ignore[arg-type]


@pytest.fixture
async def single(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """One worker on each device, so that models follow each other in it."""
    async with opened(zygote, demo_models, max_per_device=1) as rig:
        yield rig


@pytest.fixture
async def forgetful(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    async with opened(zygote, demo_models, kept_models=0) as rig:
        yield rig


@engine
@pytest.mark.parametrize("devices", [(0,), (0, 1)], ids=["one", "two-ranks"])
async def test_a_model_that_comes_back_is_not_built_again(single: Rig, devices: tuple[int, ...]) -> None:
    rig = single
    first, second, third = MODELS
    woken: dict[str, list[bool]] = {name: [] for name in MODELS}
    for name in (first, first, second, second, first, third, third, first, second):
        async with rig.engine(name, *devices) as handle:
            woken[name].append("wake" in handle.phases)
            await check(rig, handle, name, (len(woken[name]), 7))
        assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES, "what is kept has no memory"
    # The first time there is no image. Two are kept: the third model drove out the one that was used longer ago.
    assert woken == {first: [False, False, True, True], second: [False, False, False], third: [False, False]}


@engine
async def test_what_was_running_is_forgotten_and_goes_on_elsewhere(rig: Rig) -> None:
    name, p = "demo-qwen3", prompt(8)
    whole = rig.reference(name, p, 300)
    async with rig.engine(name):
        pass
    handle = await rig.activate(rig.spec(name), [rig.devices[0]])
    rids = [rig.submit(handle, tokenized(f"left-{i}", p, 300)) for i in range(3)]
    grammar = rig.submit(handle, tokenized("left-regex", p, 200, regex="[a-z ]{80,90}"))
    await rig.wait_tokens(rids[2], 5)
    left = await handle.deactivate()
    assert sorted({*left} - {grammar}) == sorted(rids)
    assert grammar in left or await rig.answer(grammar), "it may end before the others"
    async with rig.engine(name) as again:
        assert "wake" in again.phases
        for rid in rids:
            known = list(rig.tokens[rid])
            request = tokenized(rid, p, 300)
            assert await rig.ask(again, request, attempt=1, resumed=known) == whole
        await check(rig, again, name, (1, 2))


@engine
async def test_other_limits_and_other_files_are_another_build(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(rig.models / "demo-llama", folder)
    spec = rig.spec_at(folder)

    async def woken(**kwargs: int) -> bool:
        handle = await rig.activate(spec, [rig.devices[0]], **kwargs)
        p = prompt(5)
        assert await rig.ask(handle, tokenized("", p, NEW)) == rig.reference("demo-llama", p, NEW)
        await handle.deactivate()
        return "wake" in handle.phases

    assert [await woken() for _ in range(3)] == [False, False, True]
    assert not await woken(kv_limit_bytes=8 << 20)
    assert await woken(kv_limit_bytes=8 << 20) and await woken()
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = bytes(4)
    weights.write_bytes(data)
    os.utime(weights, (2e9, 2e9))
    handle = await rig.activate(spec, [rig.devices[0]])
    assert "wake" not in handle.phases and not handle.info.from_image
    await handle.deactivate()


@engine
async def test_without_any_kept_each_activation_builds(forgetful: Rig) -> None:
    for _ in range(3):
        async with forgetful.engine("demo-llama") as handle:
            assert "wake" not in handle.phases
            await check(forgetful, handle, "demo-llama", (1,))


class _Idle:
    def on_report(self, link: WorkerLink, report: object) -> None: ...
    def on_gone(self, link: WorkerLink) -> None: ...


async def test_a_model_goes_where_it_is_kept_else_where_it_drives_out_least() -> None:
    device = DeviceId("n/host:0")
    parking = ParkedTeams()
    links: dict[str, WorkerLink] = {}
    builds: dict[str, tuple[str, ...]] = {"fresh": (), "one": ("a",), "two": ("b", "c")}
    for name, kept in builds.items():
        links[name] = WorkerLink(name, device, 1, _Idle())
        links[name].kept = kept
        parking.put((links[name],), used=True)
    assert parking.take([device], "", "c") == (links["two"],)
    assert parking.take([device], "", "other") == (links["fresh"],)
    assert parking.take([device], "", "other") == (links["one"],)
    assert parking.take([device], "", "other") is None


def test_builds_are_named_by_all_that_decides_them() -> None:
    names = {build_name(a, b, c) for a in (b"{}", b'{"x":1}') for b in (None, 0, 1) for c in (1, 2)}
    assert len(names) == 12
