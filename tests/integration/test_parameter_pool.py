"""The parameter pool over three machines, each with a store of its own: spread, kept, and repaired after a death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from prism.engine.fake import FakePool
from prism.node.weights import NodeWeights
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackKey
from prism.weights.store.kept import read_kept
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from prism.wire.secret import FleetSecret
from tests.patience import happens

from .fake_system import SPEED, System, fake_system, model, start_agent

KEYS = FleetSecret("the secret of these tests").mail_keys()
MACHINES = ("x", "y", "z")
MARKS = [f"{i:032x}" for i in range(6)]


def put_image(store: WeightStore, mark: str) -> PackKey:
    """An engine's image on the machine's disk."""
    key, data = PackKey(mark, "an/image"), np.random.default_rng(int(mark, 16)).bytes(300_000)
    with store.writer(key, plan_blocks([TensorPlan("w", "uint8", (len(data),))])) as writer:
        writer.write("w", data)
        writer.finish()
    return key


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[System, dict[str, WeightStore]]]:
    """Every image stands on the disks of x and y; z has nothing."""
    stores = {n: WeightStore(folder / n, host_directory=folder / f"{n}-memory") for n in MACHINES}
    for mark in MARKS:
        put_image(stores["x"], mark)
        put_image(stores["y"], mark)
    async with fake_system(folder, [model("a")], KEYS) as system:
        system.controller.pool.marks.names = lambda: {mark: f"m{mark[-1]}" for mark in MARKS}  # type: ignore[method-assign]
        for name, store in stores.items():
            secret, models = b"secret", folder / f"{name}-models"
            weights = NodeWeights(name, store, bind="127.0.0.1:0", secret=secret, models_dir=models)
            pool = FakePool(SPEED, keys=KEYS)
            agent = start_agent(system.store, folder, pool, name, len(system.agents), name, KEYS, weights)
            system.pools.append(pool)
            system.agents.append(agent)
            system.tasks[name] = asyncio.create_task(agent.run())
        yield system, stores


def in_memory(store: WeightStore) -> set[str]:
    return {info.key.model for info in store.ls() if info.tier is Tier.HOST}


def settled(system: System, machines: int) -> bool:
    """Everything is at its home, as far as the controller was told."""
    shown = system.controller.pool.fleet.view()
    at_home = [e["home"] in e["copies"] for e in shown["entries"]]
    return len(shown["machines"]) == machines and len(at_home) == len(MARKS) and all(at_home)


async def die(system: System, name: str) -> None:
    """Its agent and its server are gone, and nobody says goodbye."""
    agent = next(a for a in system.agents if a.node == name)
    system.tasks[name].cancel()
    await asyncio.gather(system.tasks[name], return_exceptions=True)
    agent.inbox.close()


async def test_every_model_has_a_copy_and_gets_another_when_its_machine_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism.node.weights.LOOK_S", 0.1)
    async with fleet(tmp_path) as (system, stores):
        await happens(lambda: settled(system, 3), "a copy of each model at its home")
        homes = {e["fingerprint"]: e["home"] for e in system.controller.pool.fleet.view()["entries"]}
        assert sorted(homes.values()) == ["x", "x", "y", "y", "z", "z"], "evenly by bytes"
        for mark, home in homes.items():
            assert mark in in_memory(stores[home])
        await happens(lambda: all(m in marks_kept(stores[homes[m]]) for m in MARKS), "its keeping")

        await die(system, "z")
        await happens(lambda: settled(system, 2), "the repair")
        after = {e["fingerprint"]: e["home"] for e in system.controller.pool.fleet.view()["entries"]}
        assert sorted(after.values()) == ["x"] * 3 + ["y"] * 3
        for mark, home in after.items():
            assert mark in in_memory(stores[home])
        told = json.loads(await system.store.doc("pool") or "{}")
        assert {m["node"] for m in told["machines"]} <= set(MACHINES) and len(told["entries"]) == len(MARKS)


def marks_kept(store: WeightStore) -> set[str]:
    return {key.model for key in read_kept(store.host_directory)}
