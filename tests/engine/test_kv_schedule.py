"""Random schedules of everything that happens to KV outside of engines, over real engines: every answer is that of an
undisturbed run, and the books are exact in the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prism.core.specs import ModelSpec
from prism.engine.handle import EngineHandle
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.families import LATENT_ROWS, REPRESENTS, WINDOWS, make_model, named
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized, until_died
from tests.kv.stored import forget, spoil, stored

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NAME = "demo-llama"
BOUND = 6 << 20
_MOST_NEW = 25

turns = st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, _MOST_NEW))
both = st.tuples(st.just("two turns"), st.integers(0, 3), st.integers(1, _MOST_NEW))
others = st.tuples(
    st.sampled_from(["move", "come back", "kill", "short", "room", "lend", "reclaim", "corrupt", "forget"]),
    st.integers(0, 1),
    st.integers(0, 1000),
)

Schedule = list[tuple[str, int, int]]
schedules = st.lists(st.one_of(turns, both, others), min_size=8, max_size=12)


@dataclass(frozen=True)
class Talk:
    """How long conversations are: whole pieces of 64 tokens, some in common, and more."""

    first: int
    common: int
    long: int
    most: int
    """Said, with answers."""
    slower: int = 1
    """Answers are so many times shorter."""


USUAL = Talk(200, 130, 280, 400)
BRIEF = Talk(70, 66, 130, 150, slower=6)
"""Of models whose answers take longer."""


class Story:
    """Conversations with one model that anything may happen to."""

    def __init__(self, rig: Rig, spec: ModelSpec, talk: Talk) -> None:
        self.rig, self.spec, self.talk, self.at = rig, spec, talk, 0
        self.said: list[list[int]] = [[*prompt(1, talk.first)], [*prompt(1, talk.common), *prompt(2, talk.common // 3)]]
        self.said += [[*prompt(3, talk.long)], [*prompt(3, talk.long), 7]]
        accounts = rig.folder / "accounts"
        links = {f"host:{i}": DeclaredLinks(host=4e7, peer=4e8) for i in range(2)}
        write_kv_settings(accounts, KvSettings(host_bytes=BOUND, lend_keep_fraction=0.1, links=links))
        self.pool = HostPool(host_pool_directory(accounts), BOUND)
        self.engine: EngineHandle | None = None

    async def active(self) -> EngineHandle:
        if self.engine is None:
            self.engine = await self.rig.activate(self.spec, [self.rig.devices[self.at]])
        return self.engine

    async def leave(self) -> None:
        if self.engine is not None:
            await self.engine.deactivate()
            self.engine = None

    async def turn(self, number: int, tokens: int) -> None:
        said, new = self.said[number], -(-tokens // self.talk.slower)
        answer = await self.rig.ask(await self.active(), tokenized("", said, new))
        assert answer == reference(Path(self.spec.path), tuple(said), new)
        self.said[number] = [*said, *answer] if len(said) < self.talk.most else said

    async def step(self, what: str, which: int, number: int) -> None:
        account = self.rig.pool.memory[self.rig.devices[which % 2]]
        match what:
            case "turn":
                await self.turn(which, number)
            case "two turns":
                await self.active()
                await asyncio.gather(self.turn(which, number), self.turn((which + 1) % 4, _MOST_NEW + 1 - number))
            case "move" | "come back":
                await self.leave()
                self.at = which if what == "move" else self.at
            case "kill":
                engine = await self.active()
                running = self.rig.submit(engine, tokenized("", self.said[which], 60))
                await self.rig.wait_tokens(running, 1 + number % (20 // self.talk.slower))
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
        pieces = stored(self.pool)
        if not pieces:
            return
        piece = pieces[number % len(pieces)]
        if what == "forget":
            forget(self.pool, piece)
        else:
            spoil(self.pool, piece, (number * 7919) % piece.nbytes)

    async def check_books(self) -> None:
        await self.leave()
        for i, device in enumerate(self.rig.devices):
            self.rig.pool.memory[device].reap()
            assert self.rig.free_bytes(i) == DEVICE_BYTES
        use = self.pool.use()
        assert use.booked_bytes == use.file_bytes <= BOUND


Other = tuple[Path, dict[str, Any]]
"""A model and what its engine is told."""


@pytest.fixture(scope="module")
def places(zygote: Path, demo_models: Path) -> tuple[Path, Path]:
    return zygote, demo_models


async def tell(places: tuple[Path, Path], spec_of: Callable[[Rig], ModelSpec], talk: Talk, schedule: Schedule) -> None:
    zygote, models = places
    folder = Path(tempfile.mkdtemp(prefix="prism-e-"))
    rig = Rig(folder, models, zygote)
    await rig.start()
    try:
        story = Story(rig, spec_of(rig), talk)
        for step in schedule:
            await story.step(*step)
        await story.check_books()
    finally:
        await rig.close()
        drop_host_pool(folder / "accounts")
        shutil.rmtree(folder)


@settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))  # an example takes long
@given(schedule=schedules)
def test_whatever_happens_to_kv_answers_stay(places: tuple[Path, Path], schedule: Schedule) -> None:
    asyncio.run(tell(places, lambda rig: rig.spec(NAME), USUAL, schedule))


@pytest.fixture(scope="module", params=[LATENT_ROWS, WINDOWS])
def other(request: pytest.FixtureRequest, demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Other:
    """A model whose KV lies otherwise: latent rows, windows."""
    family = named(REPRESENTS[request.param])
    return make_model(family, tmp_path_factory.mktemp("model") / family.name, demo_models / NAME), family.engine


@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(schedule=schedules)
def test_and_so_do_those_of_latent_rows_and_windows(
    places: tuple[Path, Path], other: Other, schedule: Schedule
) -> None:
    path, engine = other
    asyncio.run(tell(places, lambda rig: rig.spec_at(path, **engine), BRIEF, schedule))
