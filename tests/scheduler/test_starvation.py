"""No model waits for ever: ten models on two devices that hold four of them, random traffic, profiles that have starved
somebody before. The bound is the one that docs/policies.md argues; PRISM_SOAK=6 runs an hour of each."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import OperatorUnload
from prism.core.ids import ModelName
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.paged_world import PagedWorld, Traffic

SOAK = int(os.environ.get("PRISM_SOAK", "1"))
"""How many times longer than usual."""
MAX_WAIT_S = 20.0
SETTINGS = ClusterSettings(min_residency_s=0.5, min_kv_tokens=0)
LONGEST_LOAD_S = 0.4
TURN_S = LONGEST_LOAD_S + SETTINGS.min_residency_s + 0.3
"""One claim: what loads there becomes ready, has its residency, leaves."""


def ten_models() -> list[ModelSpec]:
    """Of 151, 124 and 75 in devices of 400, pages of 20: whole pages are more than the numbers say."""
    sizes = {"large": 151, "middle": 124, "small": 75}
    specs = [
        model_spec(f"{kind}{i}", size, min_kv_bytes=1, max_wait_s=MAX_WAIT_S, slo_ttft_s=2.0)
        for i in range(4)
        for kind, size in sizes.items()
    ]
    return specs[:10]


def turning(now_s: float, models: int) -> Sequence[float]:
    """A Zipf law over the models that turns every minute."""
    turn = int(now_s // 60.0)
    return [1.0 / (1 + (i + turn) % models) for i in range(models)]


def busy_small_ones(_: float, models: int) -> Sequence[float]:
    """The small models never rest; now and then somebody asks for a large one."""
    return [30.0 if i % 3 == 2 else 0.3 if i % 3 == 0 else 0.0 for i in range(models)]


def even(_: float, models: int) -> Sequence[float]:
    return [1.0] * models


PROFILES = {
    "the soak": Traffic(4, 0.4, (0.05, 1.0), turning),
    "busy small models": Traffic(12, 0.05, (0.2, 2.0), busy_small_ones),
    "long answers": Traffic(8, 0.5, (0.5, 40.0), turning),
    "everybody always": Traffic(40, 0.05, (0.1, 3.0), even),
}


@pytest.mark.parametrize("name", list(PROFILES))
@pytest.mark.parametrize("seed", [1, 2])
def test_every_wait_is_bounded_and_no_request_is_refused(name: str, seed: int) -> None:
    models = ten_models()
    world = PagedWorld(SETTINGS, models, 400, seed)
    world.run(PROFILES[name], 600.0 * SOAK)
    left = [a for asks in world.inactive.values() for a in asks]
    waits_s = world.waits_s + [world.now - a.waits_since_s for a in left]
    assert not world.refused
    activations = sum(isinstance(e, Activate) for _, e in world.log)
    assert world.failures <= activations / 1000, "the books promised memory that is not there"
    away = bool(world.scheduler.books.turned_away)  # whose turn comes when nearly all of the bound is over
    assert max(waits_s) <= (MAX_WAIT_S if away else MAX_WAIT_S / 2 + len(models) / 2 * TURN_S)


def test_what_leaves_for_its_own_model_is_regretted_by_nobody() -> None:
    """0.0, not 0: a decision log is the same of the compiled scheduler, byte for byte."""
    world = World(SETTINGS, [model_spec("alone", 700)])
    world.join(*node_devices("n", 1))
    alone = ModelName("alone")
    world.arrive(alone, 4)
    world.pass_time(0.5)
    world.step()
    world.send(OperatorUnload(alone))  # what runs there may end
    world.arrive(alone)
    for _ in range(40):
        world.pass_time(0.5)
        for id in world.devices:
            world.report(id)
    reasons = [dict(e.reason.numbers) for _, e in world.log if isinstance(e, Deactivate) and e.carry]
    assert [repr(numbers["regret"]) for numbers in reasons] == ["0.0"]
