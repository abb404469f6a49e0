"""A step prepared while the one before is computed: the answers are the same, whatever happens to the engine.

Streams of the CPU do nothing: what is tested here is the order of things, not races.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine import test_correctness as correctness
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.engine.test_sampling import CASES

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NEW = 30


@pytest.fixture
async def ahead(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """As ``rig``, with overlap."""
    with tempfile.TemporaryDirectory(prefix="prism-o-") as folder:
        rig = Rig(Path(folder), demo_models, zygote, overlap=True)
        await rig.start()
        try:
            yield rig
        finally:
            await rig.close()


async def test_answers_are_those_of_an_engine_without_and_go_on_exactly(rig: Rig, ahead: Rig) -> None:
    async with rig.engine("demo-qwen3") as plain, ahead.engine("demo-qwen3") as handle:
        for case, sampling in CASES.items():
            name = f"case-{case}"  # seeds follow from it
            expected = await rig.ask(plain, tokenized(name, prompt(3), NEW, **sampling))
            assert await ahead.ask(handle, tokenized(name, prompt(3), NEW, **sampling)) == expected, case
            finish = ahead.finish[name]
            assert finish == rig.finish[name], case
            half = expected[: len(expected) // 2]
            again = tokenized(name, prompt(3), NEW, **sampling)
            assert await ahead.ask(handle, again, attempt=1, resumed=half) == expected, case
            assert ahead.finish[name] == finish, case


async def test_many_at_once_with_and_without_penalties(rig: Rig, ahead: Rig) -> None:
    """Requests of one batch come and go at different steps."""
    requests = [
        (
            f"mix-{i}",
            prompt(i, 20 + 9 * i),
            10 + 5 * i,
            {"frequency_penalty": 1.5, "min_new_tokens": i} if i % 2 else {},
        )
        for i in range(8)
    ]
    async with rig.engine("demo-llama") as plain, ahead.engine("demo-llama") as handle:
        for where, engine in ((rig, plain), (ahead, handle)):
            for name, tokens, new, sampling in requests:
                where.submit(engine, tokenized(name, tokens, new, **sampling))
        for name, *_ in requests:
            assert await ahead.answer(name) == await rig.answer(name), name


async def test_the_first_time_and_every_time_after(ahead: Rig) -> None:
    await correctness.test_cold_warm_other_model_again_and_elsewhere(ahead, "demo-llama")


async def test_memory_pressure(ahead: Rig) -> None:
    await correctness.test_memory_pressure_with_retraction(ahead, (0,))


async def test_leaving_in_the_middle_delivers_what_was_computed(ahead: Rig) -> None:
    whole = ahead.reference("demo-llama", prompt(8), 400)
    handle = await ahead.activate(ahead.spec("demo-llama"), [ahead.devices[0]])
    rid = ahead.submit(handle, tokenized("leaving", prompt(8), 400))
    await ahead.wait_tokens(rid, 5)
    assert await handle.deactivate() == [rid]
    known = list(ahead.tokens[rid])
    assert known == whole[: len(known)] and ahead.free_bytes() == DEVICE_BYTES
    async with ahead.engine("demo-llama", 1) as second:
        again = tokenized(rid, prompt(8), 400)
        assert await ahead.ask(second, again, attempt=1, resumed=known) == whole


@pytest.mark.slow
async def test_prefixes_limits_shares_and_two_ranks(ahead: Rig) -> None:
    from tests.engine import test_faults as faults

    await correctness.test_shared_prefixes(ahead, "demo-qwen3")
    await correctness.test_memory_wanted_by_others_comes_back(ahead)
    await faults.test_what_a_fixed_share_cannot_hold_is_cut_or_refused(ahead)
    await faults.test_aborted_requests_finish_and_free_their_memory(ahead)
    await correctness.test_tensor_parallel_of_two(ahead, "demo-llama")
    await correctness.test_memory_pressure_with_retraction(ahead, (0, 1))
    await correctness.test_resumed_in_mid_answer_after_the_engine_was_killed(ahead, "demo-stablelm")
