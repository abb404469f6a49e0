"""A controller dies: the next one finds every instance and starts none beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from prism.controller import takeover
from prism.core.events import OperatorDrain, PinChanged
from prism.core.ids import DeviceId, ModelName
from prism.obs.decisions import DecisionLog
from prism.obs.metrics import Metrics
from prism.wire.mailbox import Inbox
from tests.patience import PATIENCE_S, happens

from .fake_system import MIB, System, ended, fake_system, model, start_controller, whole
from .test_fleet import KEYS, A, all_report, join, joined


async def test_the_next_controller_starts_nothing_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pinned model nor what is ordered or asked for at once, though the machine that has the former
    reports long after the other."""
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", PATIENCE_S)
    specs = [replace(model("pinned"), pinned=True), model("b")]
    async with fake_system(tmp_path, specs, KEYS) as system:
        join(system, tmp_path, "n2")
        await joined(system, 2)
        await system.controller.admin._load_many(specs[1].name, 3, deadline_s=1e12)
        await happens(lambda: len(system.engines("pinned")) == 1, "the pinned model")
        before = {name: {h.devices for h in system.engines(name)} for name in ("pinned", "b")}

        await stopped(system)
        [late] = [a for a in system.agents if any(i.key.model == "pinned" for i in a.instances.all())]
        with Inbox("tcp://127.0.0.1:0", keys=KEYS) as inbox, monkeypatch.context() as silent:
            silent.setattr(late.outbox, "send", lambda mailbox, message: None)
            decisions = DecisionLog(tmp_path / "next.jsonl", Metrics())
            after = start_controller(tmp_path, specs, system.store, inbox, decisions, first_generation=1000)
            system.controller, system.tasks["controller"] = after, asyncio.create_task(after.run())
            early = await system.front.ask("b")
            await joined(system, 1)
            await all_report(system)
            silent.undo()
            await joined(system, 2)
            assert (await after.admin._load(specs[1].name, (), deadline_s=1e12))["was_ready"]
            await ended(early)
            await all_report(system)
            assert {name: {h.devices for h in system.engines(name)} for name in before} == before
            assert len(system.engines("pinned")) == 1 and len(system.engines("b")) == 3 and whole(early)
            assert "Activate" not in (tmp_path / "next.jsonl").read_text()
            await stopped(system)
            decisions.close()


async def test_what_operators_asked_for_holds_for_the_next_controller(tmp_path: Path) -> None:
    """A drained device stays empty though a model is pinned that would fit nowhere else, until it is taken back."""
    specs = [model("a", 90 * MIB), model("b", 90 * MIB)]
    async with fake_system(tmp_path, specs, KEYS) as system:
        await joined(system, 1)
        admin, wishes = system.controller.admin, system.controller.wishes
        await admin._load(A, (DeviceId("local/host:0"),), deadline_s=1e12)
        await admin._wish(OperatorDrain((DeviceId("local/host:1"),)))
        await admin._wish(PinChanged(A, True))
        await wishes.hold(PinChanged(ModelName("b"), True))
        await stopped(system)
        with Inbox("tcp://127.0.0.1:0", keys=KEYS) as inbox:
            decisions = DecisionLog(tmp_path / "next.jsonl", Metrics())
            after = start_controller(tmp_path, specs, system.store, inbox, decisions, first_generation=1000)
            system.controller, system.tasks["controller"] = after, asyncio.create_task(after.run())
            await joined(system, 1)
            await happens(lambda: ModelName("b") in after.scheduler.books.models, "the pin being known")
            await all_report(system)
            assert after.scheduler.books.models[ModelName("b")].pinned and not system.engines("b")
            await after.admin._wish(OperatorDrain((DeviceId("local/host:1"),), on=False))
            await happens(lambda: system.engines("b"), "the pinned model on the device that is back")
            await stopped(system)
            decisions.close()


async def stopped(system: System) -> None:
    """Its controller is gone."""
    system.tasks["controller"].cancel()
    await asyncio.gather(system.tasks["controller"], return_exceptions=True)
