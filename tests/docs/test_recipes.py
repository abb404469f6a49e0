"""What docs/contributing.md promises that a check tells: nothing that was added is known in one place only."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from prism.cli.main import VERBS
from prism.core import device_events, effects, events
from prism.wire import messages

REPO = Path(__file__).resolve().parents[2]
LIVE = ("prism/controller", "prism/node", "prism/server")
LIVES = ("prism/scheduler/request_life.py", "prism/scheduler/instance_life.py")
"""Machines that both worlds drive: what they make, both send."""

ONE_WORLD = {
    "Abort": "clients of the simulator are patient",
    "CatalogChanged": "a simulated catalog is given at the start",
    "OperatorUnload": "no simulated operator unloads",
    "ActivationStarted": "the live world says it with the answer",
    "FleetKnown": "a simulated scheduler takes over from nobody",
    "DeviceLost": "no agent tells a failed GPU from engines that died there one by one",
}
"""Events and effects that one world has no occasion for."""
RUN_BY_OTHERS = {
    "benchmarks.live.burst_client",
    "benchmarks.memory.rival",
    "benchmarks.server.canned",
    "benchmarks.weights.gloo_worker",
}
"""Processes that benchmarks start."""


@cache
def source(*folders: str) -> str:
    files = [file for folder in folders for file in sorted((REPO / folder).rglob("*.py"))]
    return "\n".join(file.read_text() for file in [*files, *(REPO / name for name in folders if name.endswith(".py"))])


def makes(name: str, *folders: str) -> bool:
    return re.search(rf"^(?!\s*case ).*\b{name}\(", source(*folders), re.MULTILINE) is not None


def reads(name: str, *folders: str) -> bool:
    """A ``case`` or an ``isinstance`` of it."""
    return re.search(rf"case [^:\n]*\b{name}\b|isinstance\([^)]*\b{name}\b", source(*folders)) is not None


EVENTS = sorted({kind.__name__ for union in (device_events.GpuEvent, events.ClusterEvent) for kind in get_args(union)})
EFFECTS = sorted({kind.__name__ for union in (effects.GpuEffect, effects.ClusterEffect) for kind in get_args(union)})


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_sent_by_both_worlds_and_read_by_a_scheduler(name: str) -> None:
    worlds = [makes(name, *LIVE, *LIVES), makes(name, "prism/sim", *LIVES)]
    assert any(worlds)
    assert all(worlds) != (name in ONE_WORLD), "one world does not send it, or the list of exceptions is stale"
    assert reads(name, "prism/scheduler")


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_is_decided_and_carried_out_in_both_worlds(name: str) -> None:
    assert makes(name, "prism/scheduler")
    worlds = [reads(name, *LIVE), reads(name, "prism/sim")]
    assert any(worlds)
    assert all(worlds) != (name in ONE_WORLD), "one world does not carry it out, or the list of exceptions is stale"


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in get_args(messages.AnyMessage)))
def test_a_message_is_sent_and_read(name: str) -> None:
    users = (*LIVE, "prism/engine", "prism/store", "prism/supervisor")
    assert makes(name, *users)
    assert reads(name, *users) or re.search(rf"(: |Decoder\(|type=){name}\b", source(*users))


def test_every_file_with_hooks_is_collected() -> None:
    with_hooks = {
        file.stem for file in (REPO / "sglang_patches").glob("*.py") if re.search(r"^HOOKS\b", file.read_text(), re.M)
    }
    collected = re.search(r"modules = \(([^)]*)\)", (REPO / "sglang_patches" / "__init__.py").read_text())
    assert collected is not None
    assert {name.strip() for name in collected[1].split(",") if name.strip()} == with_hooks


def test_every_command_is_a_verb() -> None:
    commands = re.compile(r"^@click\.(command|group)\(", re.MULTILINE)
    modules = {file.stem for file in (REPO / "prism" / "cli").glob("*.py") if commands.search(file.read_text())}
    assert modules - {"main"} == {verb.module.rpartition(".")[2] for verb in VERBS.values()}


def test_every_benchmark_is_in_a_document() -> None:
    files = [file for file in (REPO / "benchmarks").rglob("*.py") if "__main__" in file.read_text()]
    modules = {".".join(file.relative_to(REPO).with_suffix("").parts) for file in files} - RUN_BY_OTHERS
    documents = "\n".join(file.read_text() for file in (REPO / "docs").rglob("*.md"))
    assert sorted(name for name in modules if not re.search(rf"{re.escape(name)}\b", documents)) == []
