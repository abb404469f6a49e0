"""Everything about sampling stays with the leader: over a route an engine answers what it answers by itself."""

from __future__ import annotations

import pytest

from tests.engine.rig import Rig, prompt, tokenized
from tests.engine.test_remote_layers import NEW, Pair, pair
from tests.engine.test_sampling import CASES

pytestmark = pytest.mark.engine


@pytest.mark.slow
async def test_every_kind_of_sampling_over_a_route_and_resumed_there(rig: Rig) -> None:
    async with pair(rig, "demo-qwen3") as p:
        await p.leader.remote.set_route(p.over(p.path, 2, p.pieces - 1))
        await p.leader.remote.hold_pieces([0, 1, p.pieces - 1])
        for case, sampling in CASES.items():
            name = f"case-{case}"  # seeds follow from it
            expected = await rig.ask(p.whole, tokenized(name, prompt(3), NEW, **sampling))
            finish = rig.finish[name]
            led = await rig.ask(p.leader, tokenized(name, prompt(3), NEW, **sampling), attempt=1)
            assert led == expected and rig.finish[name] == finish, case
            half = expected[: len(expected) // 2]
            again = tokenized(name, prompt(3), NEW, **sampling)
            assert await rig.ask(p.leader, again, attempt=2, resumed=half) == expected, case
        await several_answers(rig, p)


async def several_answers(rig: Rig, p: Pair) -> None:
    """One prompt with several answers, as the front door asks for them, beside requests of other kinds."""
    kinds = [*({"temperature": 0.9, "sampling_seed": seed} for seed in range(4)), *CASES.values()]
    expected = [await rig.ask(p.whole, tokenized(f"n-{i}", prompt(5, 60), NEW, **k)) for i, k in enumerate(kinds)]
    requests = [tokenized(f"n-{i}", prompt(5, 60), NEW, **kind) for i, kind in enumerate(kinds)]
    rids = [rig.submit(p.leader, request, attempt=1) for request in requests]
    assert [await rig.answer(rid) for rid in rids] == expected
    assert len({tuple(tokens) for tokens in expected[:4]}) > 1
