"""Models that cannot be served are known before anybody asks for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from prism.config.catalog import load_catalog
from prism.controller import health
from prism.controller.health import CatalogHealth
from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from tests.config.test_model_files import CONFIG, TENSORS, write_safetensors
from tests.patience import PATIENCE_S


def device(memory_bytes: int) -> DeviceSpec:
    return DeviceSpec(DeviceId("n/host:0"), NodeId("n"), DeviceKind.HOST, memory_bytes)


async def known(found: CatalogHealth, devices: list[DeviceSpec], wanted: dict[str, str]) -> None:
    """Returns when what is broken is said to be: name -> a part of why."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            broken = found.broken(devices, ["good", "gone"])
            if set(broken) == set(wanted) and all(part in broken[name] for name, part in wanted.items()):
                return
            await asyncio.sleep(0.01)


async def test_broken_models_are_found_looked_at_again_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "AGAIN_S", 0.05)
    file = tmp_path / "c.yaml"
    file.write_text("models: [{name: good, path: good}, {name: gone, path: gone}]")
    for name in ("good", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / name / "tokenizer.json").write_text("{}")
        write_safetensors(tmp_path / name / "model.safetensors", TENSORS)
    (tmp_path / "gone").rename(tmp_path / "later")
    catalog, found = load_catalog(file), CatalogHealth()
    watching = asyncio.create_task(found.watch(lambda: catalog))
    await known(found, [], {"gone": "does not exist"})
    await known(found, [device(10)], {"gone": "does not exist", "good": "the largest device has 10B"})
    (tmp_path / "later").rename(tmp_path / "gone")
    await known(found, [device(1 << 30)], {})
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
