"""What waits is moved to instances as they come up, and the scheduler is told while reports do not show that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from prism.controller.dealing import Dealing
from prism.core.effects import Activate
from prism.core.events import ClusterEvent, WaitingDealt, WaitingRequests
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode

M = ModelName("m")
DEVICES = tuple(DeviceId(f"{node}/host:0") for node in "ab")


class Waiting:
    """An inactive queue."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.got: list[tuple[tuple[DeviceId, ...], int]] = []

    def count(self, model: ModelName) -> int:
        return self.left

    def route(self, model: ModelName, devices: tuple[DeviceId, ...], most: int | None) -> None:
        moved = self.left if most is None else min(most, self.left)
        self.left -= moved
        self.got.append((devices, moved))

    def state(self, model: ModelName) -> WaitingRequests:
        return WaitingRequests(model, self.left, 0.0)


class Told:
    """What the scheduler hears of dealing."""

    def __init__(self) -> None:
        self.settled: list[bool] = []
        self.over = asyncio.Event()

    def feed(self, event: ClusterEvent) -> None:
        if isinstance(event, WaitingDealt):
            self.settled.append(event.settled)
            if event.settled:
                self.over.set()


def dealing(waiting: Waiting, told: Told, live: LiveMode) -> Dealing:
    placement = SimpleNamespace(route_of=lambda model: DEVICES)
    found = Dealing(waiting, placement, told.feed)  # type: ignore[arg-type]
    why = because(ReasonCode.OPERATOR)
    found.ordered(
        Activate(InstanceKey(M, Generation(i)), whole_model([device]), why, live=live)
        for i, device in enumerate(DEVICES)
    )
    return found


async def test_the_scheduler_hears_that_queues_settle_and_that_they_have() -> None:
    """It was told neither: what it decided meanwhile was dropped, and not decided again."""
    waiting, told = Waiting(10), Told()
    deals = dealing(waiting, told, LiveMode.PIPELINES)
    deals.pass_on(M, DEVICES[:1])
    await asyncio.sleep(0)
    assert told.settled == [False]
    deals.pass_on(M, DEVICES)
    assert waiting.got == [(DEVICES[:1], 5), (DEVICES[1:], 5)]
    await told.over.wait()
    assert told.settled == [False, True], "once each"


async def test_who_does_not_come_leaves_its_share_and_queues_settle_after_that() -> None:
    waiting, told = Waiting(10), Told()
    deals = dealing(waiting, told, LiveMode.PIPELINES)
    deals.pass_on(M, DEVICES[:1])
    await told.over.wait()
    assert told.settled == [False, True] and waiting.left == 0


async def test_of_those_that_do_not_come_together_nothing_is_said() -> None:
    waiting, told = Waiting(10), Told()
    dealing(waiting, told, LiveMode.PAIR).pass_on(M, DEVICES[:1])
    await asyncio.sleep(0)
    assert waiting.got == [(DEVICES[:1], 10)] and not told.settled
