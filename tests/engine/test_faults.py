"""Bad requests, bad models, dead and slow processes: the others go on, and every byte comes back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from prism.core.ids import DeviceId, Generation
from prism.core.instances import InstanceKey, LayerRange, Part, Role
from prism.engine.errors import ActivationCause, CannotActivate, EngineGone
from prism.engine.events import AttemptFinished, Died, EngineCounters
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized, until_died
from tests.patience import PATIENCE_S, happens

pytestmark = pytest.mark.engine

BAD_REQUESTS: dict[str, Any] = {
    "schema": lambda: tokenized("", prompt(1), json_schema='{"type": "nonsense"}'),
    "regex": lambda: tokenized("", prompt(1), regex="(("),
    "too long": lambda: tokenized("", [5] * 5000),
    "foreign token": lambda: tokenized("", [99_999]),
    "negative token": lambda: tokenized("", [-1]),
    "no tokens": lambda: tokenized("", []),
    "foreign bias": lambda: tokenized("", prompt(1), logit_bias={"99999": 1.0}),
    "foreign stop": lambda: tokenized("", prompt(1), stop_token_ids=[99_999], min_new_tokens=3),
    "garbage": lambda: b"\x93abc",
    "nothing": lambda: b"",
}


async def test_a_bad_request_ends_only_itself(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        p = prompt(9)
        good = rig.submit(handle, tokenized("", p, 60))
        rids = {case: rig.submit(handle, make()) for case, make in BAD_REQUESTS.items()}
        for case, rid in rids.items():
            await rig.answer(rid)
            assert rig.finish[rid]["type"] == "abort", case
            assert rig.finish[rid]["status_code"] == 400, case
            assert rig.finish[rid]["message"], case
        assert await rig.answer(good) == rig.reference("demo-llama", p, 60)
        assert handle.alive


async def test_what_a_fixed_share_cannot_hold_is_cut_or_refused(rig: Rig) -> None:
    """One and a half pages are one; a request that the engine lets in never waits for memory that cannot come."""
    async with rig.engine("demo-llama", kv_limit_bytes=3 << 20) as handle:
        slots = (2 << 20) // handle.info.kv_bytes_per_token
        assert slots - 8 < handle.max_request_tokens <= slots
        p = prompt(3, slots - 40)
        answer = await rig.ask(handle, rid := tokenized("cut", p, 200))
        assert 30 < len(answer) < 40
        assert answer == rig.reference("demo-llama", p, 200)[: len(answer)]
        assert rig.finish[rid.rid]["type"] == "length"
        refused = rig.submit(handle, tokenized("", prompt(4, slots + 1), 1))
        await rig.answer(refused)
        assert rig.finish[refused]["type"] == "abort"
        assert rig.finish[refused]["status_code"] == 400


async def test_aborted_requests_finish_and_free_their_memory(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        rids = [rig.submit(handle, tokenized("", prompt(i), 1500)) for i in range(4)]
        await rig.wait_tokens(rids[0], 3)
        for rid in rids:
            handle.abort(rid)
        handle.abort("unknown")
        for rid in rids:
            await rig.answer(rid)
            assert rig.finish[rid]["type"] == "abort"
        await happens(lambda: not handle.running, "the engine knowing that it runs nothing")


async def test_a_front_door_that_does_not_read_loses_its_requests_only(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        lost = rig.submit(handle, tokenized("", prompt(1), 20), front="nonsense://nowhere")
        p = prompt(2)
        assert await rig.ask(handle, tokenized("", p, 20)) == rig.reference("demo-llama", p, 20)
        events = handle.events()
        async with asyncio.timeout(PATIENCE_S):
            found = [type(e).__name__ async for e in until(events, lost)]
        assert found[-1] == "Lost"


async def until(events: Any, rid: str) -> Any:
    async for event in events:
        yield event
        if type(event).__name__ == "Lost" and event.rid == rid:
            return


def broken(rig: Rig, folder: Path, **changes: Any) -> Path:
    """A copy of a demo model whose configuration has ``changes``."""
    shutil.copytree(rig.models / "demo-llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


async def fails(rig: Rig, path: Path, cause: ActivationCause, **kwargs: Any) -> str:
    with pytest.raises(CannotActivate) as caught:
        await rig.activate(rig.spec_at(path), [rig.devices[0]], **kwargs)
    assert caught.value.cause is cause, caught.value
    assert rig.free_bytes() == DEVICE_BYTES, "nothing of the attempt is left"
    return caught.value.detail


async def test_models_that_cannot_be_activated_say_why(rig: Rig, tmp_path: Path) -> None:
    await fails(rig, tmp_path / "absent", ActivationCause.MISSING)

    truncated = broken(rig, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    await fails(rig, truncated, ActivationCause.CORRUPT)

    garbage = broken(rig, tmp_path / "garbage")
    (garbage / "model.safetensors").write_bytes(os.urandom(100_000))
    await fails(rig, garbage, ActivationCause.CORRUPT)

    (unweighted := broken(rig, tmp_path / "unweighted") / "model.safetensors").unlink()
    await fails(rig, unweighted.parent, ActivationCause.MISSING)

    mismatched = broken(rig, tmp_path / "mismatched", hidden_size=128)
    await fails(rig, mismatched, ActivationCause.CORRUPT)

    unknown = broken(rig, tmp_path / "unknown", architectures=["NobodyKnowsThisForCausalLM"])
    await fails(rig, unknown, ActivationCause.UNSUPPORTED)

    (broken(rig, tmp_path / "syntax") / "config.json").write_text("{not json")
    await fails(rig, tmp_path / "syntax", ActivationCause.CORRUPT)

    async with rig.engine("demo-llama") as handle:
        p = prompt(1)
        assert await rig.ask(handle, tokenized("", p)) == rig.reference("demo-llama", p, 20)


async def test_an_unmanaged_kv_layout_is_refused(rig: Rig) -> None:
    spec = rig.spec("demo-llama", enable_hierarchical_cache=True)
    with pytest.raises(CannotActivate) as caught:
        await rig.activate(spec, [rig.devices[0]])
    assert caught.value.cause is ActivationCause.UNSUPPORTED, caught.value
    assert rig.free_bytes() == DEVICE_BYTES


async def test_models_larger_than_the_device_or_its_free_memory(rig: Rig) -> None:
    spec = rig.spec("demo-llama")
    large = type(spec)(**{f: getattr(spec, f) for f in spec.__dataclass_fields__} | {"weight_bytes": 1 << 40})
    with pytest.raises(CannotActivate) as caught:
        await rig.activate(large, [rig.devices[0]])
    assert caught.value.cause is ActivationCause.TOO_LARGE

    account = rig.pool.memory[rig.devices[0]]
    with account.register("resident") as resident:
        resident.reserve(DEVICE_BYTES - (4 << 20), "staging")
        with pytest.raises(CannotActivate) as caught:
            await rig.activate(spec, [rig.devices[0]])
        assert caught.value.cause is ActivationCause.OUT_OF_MEMORY
    assert rig.free_bytes() == DEVICE_BYTES


async def test_wrong_devices_are_refused(rig: Rig) -> None:
    for devices in (rig.devices, [DeviceId("local/host:7")]):
        with pytest.raises(CannotActivate):
            await rig.activate(rig.spec("demo-llama"), devices)


@pytest.mark.parametrize(
    ("layers", "role"), [(None, Role.PREFILL), (None, Role.DECODE), (LayerRange(0, 1), Role.STAGE)], ids=str
)
async def test_parts_that_no_engine_can_run_are_refused(rig: Rig, layers: LayerRange | None, role: Role) -> None:
    spec, part = rig.spec("demo-llama"), Part((rig.devices[0],), layers, role)
    with pytest.raises(CannotActivate, match=f"role {role}") as caught:
        await rig.pool.activate(InstanceKey(spec.name, Generation(1)), spec, part)
    assert caught.value.cause is ActivationCause.UNSUPPORTED


async def test_a_killed_engine_frees_everything_and_the_pool_refills(rig: Rig) -> None:
    for device in (0, 1):
        handle = await rig.activate(rig.spec("demo-qwen3"), [rig.devices[device]])
        rid = rig.submit(handle, tokenized("", prompt(1), 1000))
        await rig.wait_tokens(rid, 5)
        assert rig.free_bytes(device) < DEVICE_BYTES
        os.kill(handle.pids[0], signal.SIGKILL)
        events = await until_died(handle)
        assert not [e for e in events if isinstance(e, AttemptFinished)]
        assert rig.free_bytes(device) == DEVICE_BYTES
        with pytest.raises(EngineGone):
            rig.submit(handle, tokenized("", prompt(1)))
        assert await handle.deactivate() == [rid]
    await happens(lambda: all(c["parked"] == 1 for c in rig.pool.counts().values()), "the pool's being full")


async def test_one_killed_rank_ends_the_whole_engine(rig: Rig) -> None:
    handle = await rig.activate(rig.spec("demo-llama", tp=2), rig.devices)
    rid = rig.submit(handle, tokenized("", prompt(1), 1000))
    await rig.wait_tokens(rid, 5)
    pids = handle.pids
    os.kill(pids[1], signal.SIGKILL)
    assert type((await until_died(handle))[-1]).__name__ == "Died"
    await happens(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of all ranks")
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


async def test_deactivation_returns_what_was_running(rig: Rig) -> None:
    handle = await rig.activate(rig.spec("demo-llama"), [rig.devices[0]])
    rids = [rig.submit(handle, tokenized("", prompt(i), 1000)) for i in range(3)]
    await rig.wait_tokens(rids[0], 3)
    assert sorted(await handle.deactivate()) == sorted(rids)
    assert rig.free_bytes() == DEVICE_BYTES
    assert await handle.deactivate() == sorted(rids)


async def test_deactivation_with_grace_lets_requests_finish(rig: Rig) -> None:
    handle = await rig.activate(rig.spec("demo-llama"), [rig.devices[0]])
    p = prompt(1)
    rid = rig.submit(handle, tokenized("", p, 40))
    assert await handle.deactivate(grace_s=PATIENCE_S) == []
    assert await rig.answer(rid) == rig.reference("demo-llama", p, 40)


async def test_an_idle_engine_holds_one_page_and_reports_its_load(rig: Rig) -> None:
    async with rig.engine("demo-stablelm") as handle:
        await rig.ask(handle, tokenized("", prompt(1), 10))
        async with asyncio.timeout(PATIENCE_S):
            async for event in handle.events():
                if isinstance(event, EngineCounters) and event.running == 0 and event.cached_kv_tokens > 0:
                    break
        assert handle.load is not None
        assert handle.load.kv_mapped_bytes == 2 << 20
        assert handle.load.weight_bytes == handle.info.weight_bytes


async def test_closing_the_pool_leaves_no_process(rig: Rig) -> None:
    before = {p.pid for p in psutil.process_iter() if is_worker(p)}
    handle = await rig.activate(rig.spec("demo-llama"), [rig.devices[0]])
    rig.submit(handle, tokenized("", prompt(1), 1000))
    assert before
    await rig.pool.close()
    await happens(lambda: not any(is_ours(pid) for pid in before | set(handle.pids)), "the end of all workers")
    assert not handle.alive


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("prism: engine") or "prism: engine" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def is_ours(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return f"w{os.getpid():x}-" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.parametrize(("signal_number", "blamed"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
async def test_what_an_engine_did_itself_is_its_requests_doing(
    rig: Rig, signal_number: signal.Signals, blamed: bool
) -> None:
    """A crash names what was running; SIGKILL comes from outside and says nothing about it."""
    handle = await rig.activate(rig.spec("demo-llama"), [rig.devices[0]])
    rid = rig.submit(handle, tokenized("", prompt(1), 1000))
    await rig.wait_tokens(rid, 3)
    os.kill(handle.pids[0], signal_number)
    died = (await until_died(handle))[-1]
    assert isinstance(died, Died)
    assert died.suspects == ((rid,) if blamed else ())
