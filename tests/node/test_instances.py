"""The life of instances on a node, on fake engines."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import msgspec
import pytest

from prism.core.device_events import EngineDown
from prism.core.events import ActivationError
from prism.core.ids import Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.engine.fake import FakePool, FakeSpeed
from prism.node.instances import Instances
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.wire import keys
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.messages import CommandResult
from prism.wire.reports import InstanceReport
from tests.integration.fake_system import model
from tests.patience import happens

from .conftest import DEVICE, Bench

MODEL = model("m")
OLD, NEW = (InstanceKey(ModelName("m"), Generation(n)) for n in (1, 2))
ENDLESS = FakeSpeed(activation_s=0.01, prefill_s=0.001, step_s=3600.0)


@pytest.fixture
async def instances(bench: Bench) -> AsyncIterator[Instances]:
    """Of a node with the bench's device."""
    pool = FakePool(ENDLESS)
    made = Instances(NodeId("local"), pool, {DEVICE: bench.shell}, lambda: None, NodeMeasures(Metrics(), []))
    bench.on_emptied = made.note_emptied
    yield made
    made.close()
    await pool.close()


def endless_payload() -> bytes:
    """A request for more tokens than the test waits for, as a front door codes it."""
    fields: list[object] = [None] * 12
    fields[0], fields[4] = "TokenizedGenerateReqInput", ["q", array("q", [1, 2, 3]).tobytes()]
    fields[8] = {"max_new_tokens": 1000}
    return msgspec.msgpack.encode(fields)


async def activate(instances: Instances, key: InstanceKey) -> CommandResult:
    parts = whole_model([DEVICE])
    return await instances.command(
        ActivateCommand(command=f"up {key}", reply_to="", key=key, parts=parts, spec=MODEL, reason="test")
    )


def deactivate(instances: Instances, key: InstanceKey, *, carry: bool) -> asyncio.Task[CommandResult]:
    order = DeactivateCommand(command=f"down {key} {carry}", reply_to="", key=key, carry=carry)
    return asyncio.create_task(instances.command(order))


def states(instances: Instances) -> dict[InstanceKey, str]:
    reports: list[InstanceReport] = instances.reports()
    return {report.key: report.state.value for report in reports}


async def test_two_generations_and_the_older_one_is_carried_over_when_it_is_told_so(
    bench: Bench, instances: Instances
) -> None:
    assert (await activate(instances, OLD)).ok
    await bench.submit("a", payload=endless_payload())
    await happens(lambda: bench.shell.counts(OLD).served, "its first token")
    assert (await activate(instances, NEW)).ok
    leaving = deactivate(instances, OLD, carry=False)
    await happens(lambda: states(instances)[OLD] == "draining", "the drain")
    assert bench.shell.running(OLD) == 1, "it may finish"
    assert not leaving.done()
    assert (await deactivate(instances, OLD, carry=True)).ok
    assert (await leaving).ok
    assert list(states(instances)) == [NEW]
    assert await bench.left(keys.INACTIVE_QUEUE) == 0, "the other one takes over, when the front door has answered"


async def test_the_same_instance_is_not_made_twice(instances: Instances) -> None:
    assert (await activate(instances, OLD)).ok
    parts = whole_model([DEVICE])
    again = ActivateCommand(command="again", reply_to="", key=OLD, parts=parts, spec=MODEL, reason="test")
    assert (await instances.command(again)).error == ActivationError.STALE.value


async def test_what_is_told_to_leave_while_it_loads_leaves_when_it_is_loaded(instances: Instances) -> None:
    loading = asyncio.create_task(activate(instances, OLD))
    await happens(lambda: states(instances), "the command")
    leaving = deactivate(instances, OLD, carry=False)
    assert (await loading).ok and (await leaving).ok
    assert not states(instances)


async def test_a_drain_ends_with_the_last_request(bench: Bench, instances: Instances) -> None:
    await activate(instances, OLD)
    await bench.submit("a", payload=endless_payload())
    await happens(lambda: bench.shell.counts(OLD).served, "its first token")
    leaving = deactivate(instances, OLD, carry=False)
    await happens(lambda: states(instances)[OLD] == "draining", "the drain")
    bench.shell.desk.cancel("a")
    assert (await leaving).ok and not states(instances)


async def test_an_engine_that_dies_while_it_drains_goes_down_once(bench: Bench, instances: Instances) -> None:
    told: list[object] = []
    hear = bench.shell.scheduler.on_event
    bench.shell.scheduler.on_event = lambda event, now_s: told.append(event) or hear(event, now_s)  # type: ignore[method-assign,func-returns-value]
    await activate(instances, OLD)
    await bench.submit("a", payload=endless_payload())
    await happens(lambda: bench.shell.counts(OLD).served, "its first token")
    leaving = deactivate(instances, OLD, carry=False)
    await happens(lambda: states(instances)[OLD] == "draining", "the drain")
    (engine,) = [instance.handle for instance in instances.all()]
    engine.kill()  # type: ignore[union-attr]
    assert (await leaving).ok and not states(instances)
    await bench.settle()
    assert told.count(EngineDown(OLD)) == 1
