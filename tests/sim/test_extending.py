"""The recipes of docs/sim.md ("Extending"), as far as they are done without changing a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode, because
from prism.core.settings import PolicySettings
from prism.core.specs import ModelShape
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import NoRoom, Room
from prism.scheduler.records import ModelRecord
from prism.scheduler.survey import Survey
from prism.sim import gpus, models, world
from prism.sim.cluster_file import parse_cluster
from prism.sim.models import KnownModel, known_spec
from prism.sim.roofline import step_cost
from tests.sim.helpers import h100s, llamas, random_rows, run

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_a_gpu_is_an_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without NVLink: weights come through its own PCIe link, and tensor parallelism works over PCIe."""
    slow = gpus._gpu("L40S", 48, 362.0, 864, 0, 32)
    monkeypatch.setitem(gpus.GPUS, slow.name, slow)
    cluster = parse_cluster({"groups": [{"gpu": "L40S", "gpus_per_node": 4}]}, "test")
    specs = (replace(llamas(1)[0], tp=2), llamas(2)[1])
    result, _ = run(cluster, specs, random_rows([s.name for s in specs], 1, 20, 20.0))
    assert len(result.world.recorder.records) == 20
    assert not [r for r in result.world.recorder.records if r.error]
    one, two = (step_cost(known_spec("m", LLAMA, 1.0, 0.1, tp), slow).prefill_tokens_per_s(2048) for tp in (1, 2))
    assert one < two < 2 * one


def test_a_model_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    added = KnownModel("acme/tiny-2b", 2e9, ModelShape(24, 2048, 16, 4, 128, 8192, 64000), 8192)
    monkeypatch.setitem(models.MODELS, added.name, added)
    result, _ = run(h100s(1), (known_spec("m", added.name, 1.0, 0.1),), random_rows(["m"], 1, 10, 10.0))
    assert not [r for r in result.world.recorder.records if r.error]


class FirstFit(ClusterPolicy):
    """The smallest policy: a wanted model goes to the first device with room and stays."""

    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        need = model.spec.shard_weight_bytes + self.books.shard_kv_bytes(model.spec)
        room = self.books.fleet.room()
        for id, index in self.books.fleet.index.items():
            if room[index] >= need:
                return Room.on((id,))
        return NoRoom(waits=because(ReasonCode.NO_ROOM, waiting=model.waiting))


def test_a_policy_is_a_class_with_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "cluster_scheduler", lambda settings, specs: ClusterScheduler(settings, specs, FirstFit))
    specs = llamas(3)
    result, log = run(h100s(2), specs, random_rows([s.name for s in specs], 1, 40, 20.0))
    assert not [r for r in result.world.recorder.records if r.error]
    activated = {line["model"]: line["devices"] for line in log if line["do"] == "Activate"}
    assert activated == {ModelName(s.name): ["node0/cuda:0"] for s in specs}


def test_presets_cover_every_policy() -> None:
    for name in ("prism", "static", "muxserve", "qlm", "serverlessllm"):
        assert PolicySettings.named(name).cluster.policy.value == name
