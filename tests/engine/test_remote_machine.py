"""An engine that leads while its weights arrive, in any order of routes, pieces, growth, switches and deaths of peers:
every answer is the reference's, and in the end it is alone, with books that agree."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from prism.engine.handle import EngineHandle
from prism.remote.orders import KvWay, RouteStop
from prism.weights.store.weight_store import WeightStore
from tests.engine.rig import Rig, prompt, tokenized
from tests.engine.slow_image import SlowImage
from tests.patience import happens

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NAME, PIECES = "demo-llama", 6
FIRST, LATER = (0, 1, 5), (2, 3, 4)


class Leading(RuleBasedStateMachine):
    """One engine with its first pieces, and two that have all and run the others for it, of which both may die."""

    def __init__(self, zygote: Path, models: Path) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="prism-r-"))
        self.loop = asyncio.Runner()
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.arrived: set[int] = set()
        self.peers: dict[str, EngineHandle] = {}
        self.grows = False
        self.loop.run(self._start(zygote, models))

    async def _start(self, zygote: Path, models: Path) -> None:
        self.rig = rig = Rig(self.folder, models, zygote)
        await rig.start()
        spec = rig.spec(NAME)
        for path in ("one", "two"):
            engine = self.peers[str(self.folder / path)] = await rig.activate(spec, [rig.devices[0]])
            await engine.remote.serve_layers(self.folder / path)
        rig.pool.memory[rig.devices[0]].offer(0)
        self.image = SlowImage(WeightStore(self.folder / "store"), NAME)
        self.image.arrive(*FIRST)
        self.leader = await rig.activate(spec, [rig.devices[1]], first_pieces=FIRST)

    @rule(seed=st.integers(1, 50), length=st.integers(5, 120), tokens=st.integers(1, 60))
    def ask(self, seed: int, length: int, tokens: int) -> None:
        text = prompt(seed, length)
        self.asked[self.rig.submit(self.leader, tokenized("", text, tokens))] = (text, tokens)

    @precondition(lambda self: self.peers and len(self.arrived) < len(LATER))
    @rule(swap=st.booleans(), begins=st.sampled_from([1, 2]))
    def lead_over_others(self, swap: bool, begins: int) -> None:
        """Over those that live, one of them as a fallback; layers of its own may run there, too."""
        paths = sorted(self.peers, reverse=swap)
        routes = [
            [RouteStop("", 0, begins), RouteStop(path, begins, PIECES - 1), RouteStop("", PIECES - 1, PIECES)]
            for path in paths
        ]
        self.loop.run(self.leader.remote.set_route(*routes))

    @rule(kv=st.sampled_from([KvWay.AUTO, KvWay.FETCH, KvWay.RECOMPUTE]), order=st.permutations(LATER))
    def grow(self, kv: KvWay, order: list[int]) -> None:
        self.loop.run(self.leader.remote.grow_route(kv, order=order))
        self.grows = True

    @rule(piece=st.sampled_from(LATER))
    def arrive(self, piece: int) -> None:
        if piece not in self.arrived:
            self.image.arrive(piece)
            self.arrived.add(piece)

    @precondition(lambda self: self.peers)
    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        path = sorted(self.peers)[which % len(self.peers)]
        os.kill(self.peers.pop(path).pids[0], signal.SIGKILL)

    @rule(seconds=st.sampled_from([0.05, 0.3]))
    def go_on(self, seconds: float) -> None:
        """Engines do; whatever comes next comes in the middle of something else."""
        self.loop.run(asyncio.sleep(seconds))

    def teardown(self) -> None:
        try:
            self.loop.run(self._end())
        finally:
            self.loop.run(self.rig.close())
            self.loop.close()
            self.image.close()
            shutil.rmtree(self.folder)

    async def _end(self) -> None:
        self.image.arrive(*LATER)
        await self.leader.remote.grow_route()
        for rid, (text, tokens) in self.asked.items():
            assert await self.rig.answer(rid) == self.rig.reference(NAME, text, tokens)
        await happens(self._alone, "its needing nobody")
        text = prompt(1, 40)
        answer = await self.rig.ask(self.leader, tokenized("", text, 20))
        assert answer == self.rig.reference(NAME, text, 20)
        for engine in (self.leader, *self.peers.values()):
            await engine.deactivate()
        for i, device in enumerate(self.rig.devices):
            capacity = self.rig.pool.memory[device].capacity_bytes
            await happens(lambda i=i, all=capacity: self.rig.free_bytes(i) == all, "all memory coming back")  # type: ignore[misc]

    def _alone(self) -> bool:
        load = self.leader.load
        return bool(load and load.remote and load.remote.alone)


def test_in_whatever_order_things_happen_every_answer_is_exact(zygote: Path, demo_models: Path) -> None:
    few = settings(max_examples=4, stateful_step_count=12)
    run_state_machine_as_test(partial(Leading, zygote, demo_models), settings=few)  # type: ignore[no-untyped-call]
