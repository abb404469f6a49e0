"""The first activation from packed files - an index, a copy, another machine's memory - answers token for token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prism.engine.handle import EngineHandle
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan
from prism.weights.exchange.pack_fetch import fetch_pack
from prism.weights.exchange.pack_windows import PackWindows, window_name
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.format import PackHeader
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from tests.engine.rig import Rig, prompt, tokenized

pytestmark = pytest.mark.engine
NEW = 30
SECRET = b"a secret for tests"


async def check(rig: Rig, handle: EngineHandle, name: str) -> None:
    asked = prompt(5)
    rid = rig.submit(handle, tokenized("", asked, NEW))
    assert await rig.answer(rid) == rig.reference(name, asked, NEW)


async def activate(rig: Rig, name: str, header: PackHeader, store: WeightStore) -> None:
    """Cold from the pack, then from the image that this left; no second copy stays in memory."""
    async with rig.engine(name) as cold:
        assert not cold.info.from_image
        assert "weights.unpack" in cold.phases
        await check(rig, cold, name)
    assert "raw" not in store.where(header.key.model).host
    async with rig.engine(name) as again:
        assert again.info.from_image
        await check(rig, again, name)


@pytest.mark.parametrize(("name", "copy"), [("demo-llama", False), ("demo-qwen3", True)])
async def test_from_disk(rig: Rig, name: str, copy: bool) -> None:
    store = WeightStore(rig.folder / "store")
    header = pack_folder(store, rig.models / name, copy=copy)
    await activate(rig, name, header, store)


async def test_from_another_machines_memory(rig: Rig, tmp_path: Path) -> None:
    name = "demo-stablelm"
    there = WeightStore(tmp_path / "there", host_directory=tmp_path / "host")
    store = WeightStore(rig.folder / "store")
    servers = [TransferServer(PackWindows(s), "127.0.0.1:0", SECRET, n) for s, n in ((there, "there"), (store, "here"))]
    try:
        header = pack_folder(there, rig.models / name)
        addresses = {server.node: server.address for server in servers}
        plan = NodePlan(
            session="s", window=window_name(header.key), node="here", addresses=addresses, sources=("there",), pieces=4
        )
        fetch_pack(store, servers[1], plan).close()
        servers[1].leave_session("s")
    finally:
        for server in servers:
            server.close()
    shutil.rmtree(tmp_path / "there")
    assert [info.tier for info in store.ls()] == [Tier.HOST]
    await activate(rig, name, header, store)


async def test_a_stale_pack_is_passed_over(rig: Rig, tmp_path: Path) -> None:
    """Its files changed since: the engine reads them as they are now, and says so in its log."""
    name = "demo-llama"
    folder = shutil.copytree(rig.models / name, tmp_path / "m")
    store = WeightStore(rig.folder / "store")
    pack_folder(store, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    async with rig.engine(name) as cold:
        assert "weights.unpack" not in cold.phases
        await check(rig, cold, name)
