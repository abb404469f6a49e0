"""Random schedules of everything that happens to KV outside of engines, over real engines: every answer is that of an
undisturbed run, and the books are exact in the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prism.engine.handle import EngineHandle
from prism.kv.host_pool import HostPool, drop_host_pool, host_pool_directory
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized, until_died

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NAME = "demo-llama"
BOUND = 6 << 20

turns = st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 25))
both = st.tuples(st.just("two turns"), st.integers(0, 3), st.integers(1, 25))
others = st.tuples(
    st.sampled_from(["move", "come back", "kill", "short", "room", "lend", "reclaim", "corrupt", "forget"]),
    st.integers(0, 1),
    st.integers(0, 1000),
)
schedules = st.lists(st.one_of(turns, both, others), min_size=8, max_size=12)


class Story:
    """Conversations with one model that anything may happen to."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.at = rig, 0
        self.said: list[list[int]] = [[*prompt(1, 200)], [*prompt(1, 130), *prompt(2, 90)], [*prompt(3, 280)]]
        self.said.append([*self.said[2], 7])
        accounts = rig.folder / "accounts"
        links = {f"host:{i}": DeclaredLinks(host=4e7, peer=4e8) for i in range(2)}
        write_kv_settings(accounts, KvSettings(host_bytes=BOUND, lend_keep_fraction=0.1, links=links))
        self.pool = HostPool(host_pool_directory(accounts), BOUND)
        self.engine: EngineHandle | None = None

    async def active(self) -> EngineHandle:
        if self.engine is None:
            self.engine = await self.rig.activate(self.rig.spec(NAME), [self.rig.devices[self.at]])
        return self.engine

    async def leave(self) -> None:
        if self.engine is not None:
            await self.engine.deactivate()
            self.engine = None

    async def turn(self, number: int, new: int) -> None:
        said = self.said[number]
        answer = await self.rig.ask(await self.active(), tokenized("", said, new))
        assert answer == self.rig.reference(NAME, said, new)
        self.said[number] = [*said, *answer] if len(said) < 400 else said

    async def step(self, what: str, which: int, number: int) -> None:
        account = self.rig.pool.memory[self.rig.devices[which % 2]]
        match what:
            case "turn":
                await self.turn(which, number)
            case "two turns":
                await self.active()
                await asyncio.gather(self.turn(which, number), self.turn((which + 1) % 4, 26 - number))
            case "move" | "come back":
                await self.leave()
                self.at = which if what == "move" else self.at
            case "kill":
                engine = await self.active()
                running = self.rig.submit(engine, tokenized("", self.said[which], 60))
                await self.rig.wait_tokens(running, 1 + number % 20)
                os.kill(engine.pids[0], signal.SIGKILL)
                await until_died(engine)
                self.engine = None
            case "short" | "room":
                limit = 2 * account.page_bytes if what == "short" else None
                (await self.active()).set_kv_limit(limit)
            case "lend" | "reclaim":
                account.offer(DEVICE_BYTES // 10 if what == "lend" else None)
            case "corrupt" | "forget":
                self.harm(what, number)
            case _:
                raise AssertionError(what)

    def harm(self, what: str, number: int) -> None:
        """A piece that is stored is overwritten somewhere, or is gone."""
        files = sorted(self.pool.directory.glob("*/0*"))
        if not files:
            return
        file = files[number % len(files)]
        if what == "forget":
            file.unlink()
            return
        data = bytearray(file.read_bytes())
        data[(number * 7919) % len(data)] ^= 255
        file.write_bytes(data)

    async def check_books(self) -> None:
        await self.leave()
        for i, device in enumerate(self.rig.devices):
            self.rig.pool.memory[device].reap()
            assert self.rig.free_bytes(i) == DEVICE_BYTES
        use = self.pool.use()
        assert use.booked_bytes == use.file_bytes <= BOUND
        assert not list(self.pool.directory.glob("*/.part-*"))


@pytest.fixture(scope="module")
def places(zygote: Path, demo_models: Path) -> tuple[Path, Path]:
    return zygote, demo_models


@settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))  # an example takes long
@given(schedule=schedules)
def test_whatever_happens_to_kv_answers_stay(places: tuple[Path, Path], schedule: list[tuple[str, int, int]]) -> None:
    async def tell() -> None:
        zygote, models = places
        folder = Path(tempfile.mkdtemp(prefix="prism-e-"))
        rig = Rig(folder, models, zygote)
        await rig.start()
        try:
            story = Story(rig)
            for step in schedule:
                await story.step(*step)
            await story.check_books()
        finally:
            await rig.close()
            drop_host_pool(folder / "accounts")
            shutil.rmtree(folder)

    asyncio.run(tell())
