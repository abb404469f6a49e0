"""What operators asked for outlives the controller that heard it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.controller.wishes import DOCUMENT, OperatorWishes
from prism.core.events import CatalogChanged, OperatorDrain, OperatorLoad, OperatorUnload, PinChanged
from prism.core.ids import DeviceId, ModelName
from prism.store.connect import open_store
from prism.store.interface import Store
from tests.controller.test_fleet import SPEC

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
D0, D1, D2 = DeviceId("n/0"), DeviceId("n/1"), DeviceId("n/2")


async def next_one(store: Store) -> OperatorWishes:
    wishes = OperatorWishes(store)
    await wishes.read()
    return wishes


async def test_pins_are_the_catalogs_but_for_what_operators_said() -> None:
    store = open_store("memory://")
    first = await next_one(store)
    for wish in (PinChanged(A, True), PinChanged(B, False), PinChanged(C, False), OperatorUnload(B)):
        await first.hold(wish)
    after = await next_one(store)
    assert after.pins([B]) == {B: False, A: True}, "c was never pinned"
    models = CatalogChanged(upserted=(replace(SPEC, name=B, pinned=True), replace(SPEC, name=C, pinned=False)))
    assert [spec.pinned for spec in after.applied(models).upserted] == [False, False]
    await after.forget([B])
    assert [spec.pinned for spec in after.applied(models).upserted] == [True, False]
    assert (await next_one(store)).pins([B]) == {B: True, A: True}, "the catalog has a new word on it"


async def test_drained_devices_stay_drained_until_they_are_taken_back() -> None:
    store = open_store("memory://")
    first = await next_one(store)
    await first.hold(OperatorDrain((D0, D1)))
    await first.hold(OperatorDrain((D2,), carry=True))
    after = await next_one(store)
    assert after.drains() == [OperatorDrain((D0, D1)), OperatorDrain((D2,), carry=True)]
    assert after.drains([D1, DeviceId("n/9")]) == [OperatorDrain((D1,))]
    await after.hold(OperatorDrain((D0, D2), on=False))
    assert (await next_one(store)).drains() == [OperatorDrain((D1,))]


async def test_numbers_of_instances_end_with_unloading() -> None:
    store = open_store("memory://")
    first = await next_one(store)
    await first.hold(OperatorLoad(A, (), 3))
    await first.hold(OperatorUnload(A, (D0,)))
    assert (await next_one(store)).loads() == [OperatorLoad(A, (), 3)]
    await first.hold(OperatorUnload(A))
    assert (await next_one(store)).loads() == []


async def test_what_cannot_be_read_is_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("memory://")
    await store.put_doc(DOCUMENT, "{")
    assert (await next_one(store)).drains() == [] and "unreadable" in caplog.text
