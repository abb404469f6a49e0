"""A controller dies: the next one finds every instance and starts none beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from prism.controller import takeover
from prism.obs.decisions import DecisionLog
from prism.obs.metrics import Metrics
from prism.wire.mailbox import Inbox
from tests.patience import PATIENCE_S, happens

from .fake_system import ended, fake_system, model, start_controller, whole
from .test_fleet import KEYS, all_report, join, joined


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

        system.tasks["controller"].cancel()
        await asyncio.gather(system.tasks["controller"], return_exceptions=True)
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
            system.tasks["controller"].cancel()
            await asyncio.gather(system.tasks["controller"], return_exceptions=True)
            decisions.close()
