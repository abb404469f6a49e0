"""Models that leave by themselves, and what is told when they come: on fake engines, in one process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prism.controller import controller, nodes
from prism.node import agent
from prism.wire.message import Message
from prism.wire.messages import AgentReport, CommandResult
from tests.patience import LOOK_S, PATIENCE_S, happens

from .fake_system import System, ended, fake_system, model, whole

NEVER_S = 1e6


async def silent(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the agent reports only when there is a reason."""
    await happens(lambda: system.controller.nodes.all(), "the node's first report")
    monkeypatch.setattr(nodes, "LOST_AFTER_S", NEVER_S)
    monkeypatch.setattr(agent, "HEARTBEAT_S", NEVER_S)


async def test_the_end_of_a_keep_alive_is_reported_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_system(tmp_path, [replace(model("a"), keep_alive_s=0.2)]) as system:
        await silent(system, monkeypatch)
        for _ in range(3):
            answer = await system.front.ask("a")
            await ended(answer)
            assert whole(answer)
            await happens(lambda: not system.engines("a"), "its leaving")
        log = (tmp_path / "decisions.jsonl").read_text().splitlines()
        reasons = [line["reason"] for line in map(json.loads, log) if line["do"] == "Deactivate"]
        assert {r["code"] for r in reasons} == {"keep_alive"} and all(r["idle_s"] >= 0.199 for r in reasons)


async def test_the_numbers_of_a_model_come_before_the_word_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_system(tmp_path, [model("a")]) as system:
        await silent(system, monkeypatch)
        sent: list[Message] = []
        send = system.agents[0].outbox.send

        def note(address: str, message: Message) -> bool:
            sent.append(message)
            return send(address, message)

        monkeypatch.setattr(system.agents[0].outbox, "send", note)
        await ended(await system.front.ask("a"))
        answer = next(i for i, m in enumerate(sent) if isinstance(m, CommandResult))
        report = sent[answer - 1]
        assert isinstance(report, AgentReport) and [i.state for i in report.instances] == ["ready"]


async def test_operators_see_a_model_that_came_without_waiting_for_the_next_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "WATCH_S", NEVER_S)
    async with fake_system(tmp_path, [model("a")]) as system:
        fleet = system.controller.nodes
        system.controller.admin.view = lambda: {  # type: ignore[method-assign]
            "instances": [msgspec.to_builtins(i) for node in fleet.all() for i in node.instances.values()]
        }
        await ended(await system.front.ask("a"))
        async with asyncio.timeout(PATIENCE_S):
            while not (view := await system.store.doc("cluster")):
                await asyncio.sleep(LOOK_S)
        assert [i["state"] for i in json.loads(view)["instances"]] == ["ready"]
