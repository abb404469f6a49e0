"""Ranks of tensor-parallel engines are parked as a whole and taken again, as long as each of them lives."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from prism.core.ids import DeviceId, ModelName
from prism.core.specs import ModelShape, ModelSpec
from prism.engine.link import WorkerLink
from prism.engine.parking import ParkedTeams
from prism.engine.sglang_args import group_shape
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.patience import happens

NEW = 12
A, B = DeviceId("n/host:0"), DeviceId("n/host:1")


@pytest.mark.engine
async def test_the_next_model_on_the_same_devices_takes_the_same_ranks(rig: Rig) -> None:
    pids: set[tuple[int, ...]] = set()
    for name in ("demo-llama", "demo-qwen3", "demo-llama"):
        async with rig.engine(name, 0, 1) as handle:
            pids.add(handle.pids)
            for seed in (1, 2):
                p = prompt(seed)
                assert await rig.ask(handle, tokenized("", p, NEW)) == rig.reference(name, p, NEW)
        assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert len(pids) == 1
    parked = {device: counts["parked"] for device, counts in rig.pool.counts().items()}
    assert parked == dict.fromkeys(rig.devices, 2), "one worker of its own and a rank"

    (ranks,) = pids
    async with rig.engine("demo-llama", 1, 0) as other_way_round:
        assert not set(other_way_round.pids) & set(ranks)
    os.kill(ranks[1], signal.SIGKILL)
    await happens(lambda: not any(_runs(pid) for pid in ranks), "the other rank's end")
    async with rig.engine("demo-qwen3", 0, 1) as anew:
        assert not set(anew.pids) & set(ranks)
        p = prompt(3)
        assert await rig.ask(anew, tokenized("", p, NEW)) == rig.reference("demo-qwen3", p, NEW)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _Nobody:
    def on_report(self, link: WorkerLink, report: object) -> None: ...
    def on_gone(self, link: WorkerLink) -> None: ...


async def test_teams_are_taken_by_devices_and_shape_and_ended_as_a_whole() -> None:
    def link(name: str, device: DeviceId, shape: str = "") -> WorkerLink:
        return WorkerLink(name, device, 2 if shape else 1, _Nobody(), shape)

    parking = ParkedTeams()
    used, fresh, ranks = (link("used", A),), (link("fresh", A),), (link("r0", A, "{}"), link("r1", B, "{}"))
    parking.put(fresh, used=False)
    parking.put(used, used=True)
    parking.put(ranks, used=True)
    assert parking.take([A, B], "other") is None and parking.take([B, A], "{}") is None
    assert parking.take([A], "") == used, "what was used last has the most in its caches"
    assert parking.lose(ranks[1]) == ranks and ranks[0] not in parking
    assert parking.lose(ranks[1]) == ()
    assert parking.give_up(B) == ()
    assert parking.give_up(A) == fresh and fresh[0] not in parking


def test_one_rank_has_no_shape_and_expert_groups_are_another() -> None:
    sizes = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)
    one = ModelSpec(ModelName("m"), "/m", 1.0, 0.1, 1, sizes, 0)
    two = replace(one, tp=2)
    assert group_shape(one) == "" == group_shape(replace(one, engine_args=(("ep_size", 1),)))
    assert group_shape(two) == group_shape(replace(two, engine_args=(("chunked_prefill_size", 64),))) != ""
    assert group_shape(two) != group_shape(replace(two, engine_args=(("ep_size", 2),)))
