"""Instances by key: two generations of a model on one device, and one instance on two machines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import InstanceFound
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, LayerRange, Part, Parts, Role, whole_model
from prism.core.reasons import ReasonCode, because
from prism.engine.errors import ActivationCause
from prism.engine.fake import FakeHandle
from tests.patience import happens

from .fake_system import System, ended, fake_system, model, some_tokens, whole
from .test_fleet import fleet, joined, kill

M = ModelName("a")
REASON = because(ReasonCode.OPERATOR)
HERE = DeviceId("local/host:0")
STAGES: Parts = (
    Part((HERE,), LayerRange(0, 1), Role.STAGE),
    Part((DeviceId("b/host:0"),), LayerRange(1, 2), Role.STAGE),
)


def key(generation: int) -> InstanceKey:
    return InstanceKey(M, Generation(generation))


async def order(system: System, effect: Activate | Deactivate) -> None:
    """Lets the controller carry out what its scheduler never decided."""
    await system.controller._introduce(M)
    system.controller._carry_out(effect, time.time(), {})


def engine(system: System, generation: int, device: DeviceId = HERE) -> FakeHandle | None:
    """The living engine of a generation on ``device``."""
    found = [h for h in system.engines(M) if h.key == key(generation) and device in h.devices]
    return found[0] if found else None


async def test_a_new_generation_takes_over_before_the_old_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_system(tmp_path, [model(M)]) as system:
        await joined(system, 1)
        await order(system, Activate(key(1), whole_model([HERE]), REASON))
        await happens(lambda: engine(system, 1), "the first generation")
        system.controller.feed(InstanceFound(key(1), whole_model([HERE])))
        old = [await system.front.ask(M, 300) for _ in range(3)]
        await some_tokens(old)
        await order(system, Activate(key(2), whole_model([HERE]), REASON))
        await happens(lambda: engine(system, 2), "the second generation beside it")
        first, second = engine(system, 1), engine(system, 2)
        assert first is not None and second is not None
        given = []
        submit = second.submit
        monkeypatch.setattr(second, "submit", lambda work: (given.append(work.rid), submit(work)))
        new = await system.front.ask(M, 300)
        await some_tokens([new])
        assert len(given) == 1, "who comes now is served by the new one"
        await order(system, Deactivate(key(1), whole_model([HERE]), False, REASON))
        await ended(*old)
        await happens(lambda: not first.alive, "the end of the old one")
        assert second.alive and all(whole(a) for a in old)
        assert len(given) == 1, "they finished where they were"
        await ended(new)
        assert whole(new)


async def test_an_instance_on_two_machines_comes_and_goes_as_one(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b") as system:
        await order(system, Activate(key(1), STAGES, REASON))
        both = [part.lead for part in STAGES]
        await happens(lambda: all(engine(system, 1, d) for d in both), "both parts")
        await happens(lambda: not system.controller.orders.under_way(key(1)), "the end of the order")
        [replica] = system.controller.placement.replicas(M)
        assert replica.parts == STAGES and replica.queue_device == HERE
        await order(system, Deactivate(key(1), STAGES, False, REASON))
        await happens(lambda: not any(engine(system, 1, d) for d in both), "the end of both")
        await happens(lambda: not system.controller.placement.replicas(M), "its end in the placement")


async def test_what_fails_on_one_machine_is_undone_on_the_other(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b") as system:
        system.pools[-1].failures[M] = ActivationCause.OUT_OF_MEMORY
        told = []
        system.controller.admin.concluded = told.append  # type: ignore[method-assign, assignment]
        await order(system, Activate(key(1), STAGES, REASON))
        await happens(lambda: told, "what came of it")
        assert type(told[0]).__name__ == "ActivationFailed"
        assert not system.engines(M) and not any(agent.instances.all() for agent in system.agents)


@pytest.mark.parametrize("dies", ["engine", "machine"])
async def test_what_is_left_of_an_instance_leaves_when_a_part_is_lost(tmp_path: Path, dies: str) -> None:
    async with fleet(tmp_path, "b") as system:
        await order(system, Activate(key(1), STAGES, REASON))
        there = STAGES[1].lead
        await happens(lambda: engine(system, 1) and engine(system, 1, there), "both parts")
        await happens(lambda: not system.controller.orders.under_way(key(1)), "the end of the order")
        lost = engine(system, 1, there)
        assert lost is not None
        if dies == "engine":
            lost.kill()
        else:
            await kill(system, "b")
        await happens(lambda: engine(system, 1) is None, "the end of the other part")
        assert not system.controller.placement.replicas(M)
