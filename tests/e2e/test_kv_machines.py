"""A conversation goes on from its cache on another machine; what is lost on its way there is computed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from prism.config.state import StateDir
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import host_pool_directory
from prism.kv.settings import read_kv_settings
from tests.net.netns import Hosts, why_not
from tests.patience import PATIENCE_S

from .fleet import PRISM, Fleet, Host
from .server import REPO, catalog, greedy, until

MODEL, TOKENS = "demo-llama", 16
SAID = " ".join(f"the request number {i} waits for a device" for i in range(24))
PIECES = 3
"""Whole ones of it, of 64 tokens each."""
MBIT, SLOW_MBIT = 1000.0, 1.0
"""The links, and that of "b" while KV is on its way: its megabyte takes some seconds."""


def running(fleet: Fleet, demo_models: Path) -> Iterator[Fleet]:
    """Two machines of one device each, which keep KV; both have the model's weights."""
    config = catalog(demo_models, count=1, memory="64MiB", context_length=1024)
    config["kv"] = {"keep": True, "host_memory_fraction": 0.01}
    try:
        fleet.begin_serving(config)
        fleet.begin_joining("b", 1, memory="64MiB")
        fleet.ready("local", "b")
        for device in ("b/host:0", "local/host:0"):
            until(lambda d=device: loads_on(fleet, d), f"{device} having the model")  # type: ignore[misc]
            assert fleet.ask_counted(MODEL, "hello", 4)[1] == 0
            fleet.prism("unload", MODEL)
        yield fleet
        fleet.stop()
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


def loads_on(fleet: Fleet, device: str) -> bool:
    """Not before the controller has heard of its machine, which may know sooner that it is part of the fleet."""
    return fleet.prism("load", MODEL, "--device", device, ok=False).returncode == 0


@pytest.fixture
def fleet(demo_models: Path, tmp_path: Path) -> Iterator[Fleet]:
    yield from running(Fleet(tmp_path, [Host()] * 2), demo_models)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, MBIT) as made:
        yield made


@pytest.fixture
def apart(hosts: Hosts, demo_models: Path, tmp_path: Path) -> Iterator[Fleet]:
    """The same on hosts of their own."""
    there = [Host(tuple(hosts.command(i, [])), hosts.ip(i)) for i in range(2)]
    yield from running(Fleet(tmp_path, there), demo_models)


def pool_of(fleet: Fleet, machine: str) -> HostPool:
    accounts = StateDir(fleet.folder / machine).accounts
    return HostPool(host_pool_directory(accounts), read_kv_settings(accounts).host_bytes)


def books_are_exact(fleet: Fleet) -> bool:
    """With no model anywhere: pools hold pieces and nothing else, devices nothing at all."""
    uses = [pool_of(fleet, machine).use() for machine in fleet.processes]
    return all(use.booked_bytes == use.file_bytes for use in uses) and all(
        device["free_bytes"] == device["capacity_bytes"] for device in devices(fleet)
    )


def devices(fleet: Fleet) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = fleet.look("devices")["devices"]
    return shown


def said(fleet: Fleet, models: Path, prompt: str) -> tuple[str, int]:
    """The answer, which is the undisturbed one, and how many tokens of the prompt were not computed for it."""
    answer, cached = fleet.ask_counted(MODEL, prompt, TOKENS)
    assert answer == greedy(str(models / MODEL), prompt, TOKENS)
    return answer, cached


def on(fleet: Fleet) -> list[str]:
    return [device for replica in fleet.replicas(MODEL) for device in replica["devices"]]


@pytest.mark.engine
@pytest.mark.slow
def test_a_conversation_goes_on_on_another_machine(fleet: Fleet, demo_models: Path) -> None:
    fleet.prism("load", MODEL, "--device", "local/host:0")
    first, cached = said(fleet, demo_models, SAID)
    assert cached == 0
    fleet.prism("unload", MODEL)
    fleet.prism("load", MODEL, "--device", "b/host:0")
    following = f"{SAID}{first} and then"
    before = pool_of(fleet, "local").use()
    until(lambda: pool_of(fleet, "b").use() == before, "its KV being on the other machine")
    second, cached = said(fleet, demo_models, following)
    assert cached >= PIECES * 64, "all whole pieces came over the network"
    # And back, while it is served: the new instance is ready before the old one leaves and stores what it has.
    fleet.prism("drain", "b/host:0")
    until(lambda: on(fleet) == ["local/host:0"], "b being empty")
    until(lambda: pool_of(fleet, "local").use().pieces > before.pieces + 1, "what was said there being here")
    third, cached = said(fleet, demo_models, f"{following}{second} and so on")
    assert third and cached >= (PIECES + 1) * 64, "of what was said on the other machine, too"
    fleet.prism("unload", MODEL)
    until(lambda: books_are_exact(fleet), "exact books")


def begin_leaving(fleet: Fleet, machine: str) -> list[psutil.Process]:
    """SIGTERM; returns when it has nothing left but KV. Its processes."""
    family = fleet.family(machine)
    family[0].send_signal(signal.SIGTERM)
    log = fleet.folder / machine / "logs" / f"agent-{machine}.jsonl"
    until(lambda: "of KV wait for other machines" in log.read_text(), "its KV being all that is left")
    return family


@pytest.mark.engine
@pytest.mark.slow
def test_a_machine_that_leaves_hands_its_conversations_over(fleet: Fleet, demo_models: Path) -> None:
    fleet.prism("load", MODEL, "--device", "b/host:0")
    first, cached = said(fleet, demo_models, SAID)
    assert cached == 0
    held = pool_of(fleet, "local").use().pieces
    fleet.leave("b")
    assert pool_of(fleet, "local").use().pieces > held + PIECES
    following = f"{SAID}{first} and then"
    _, cached = said(fleet, demo_models, following)
    assert cached >= PIECES * 64, "all whole pieces of what was said there"
    fleet.prism("unload", MODEL)
    until(lambda: books_are_exact(fleet), "exact books")


@pytest.mark.engine
@pytest.mark.slow
def test_a_machine_that_is_told_twice_leaves_at_once(fleet: Fleet, demo_models: Path) -> None:
    fleet.prism("load", MODEL, "--device", "b/host:0")
    first, _ = said(fleet, demo_models, SAID)
    fleet.prism("unload", MODEL)
    taker = agent_of(fleet, "local")
    assert taker is not None
    taker.suspend()
    try:
        family = begin_leaving(fleet, "b")
        assert fleet.processes["b"].poll() is None, "it waits for who does not come"
        family[0].send_signal(signal.SIGTERM)
        assert fleet.processes.pop("b").wait(PATIENCE_S) == 1
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    finally:
        taker.resume()
    fleet.ready("local")
    until(lambda: [d["id"] for d in devices(fleet)] == ["local/host:0"], "the fleet without it")
    _, cached = said(fleet, demo_models, f"{SAID}{first} and then")
    assert cached < PIECES * 64, "what it had is computed"


def controller_of(fleet: Fleet) -> psutil.Process | None:
    for process in fleet.family("local"):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "prism.controller.main" in process.cmdline():
                return process
    return None


def end_without_its_controller(fleet: Fleet, machine: str, family: list[psutil.Process]) -> str:
    """kill -9 of the controller while ``machine`` leaves: that ends all the same, and another one takes over. What the
    machine's agent logged."""
    controller = controller_of(fleet)
    assert controller is not None
    controller.kill()
    assert fleet.processes.pop(machine).wait(PATIENCE_S) == 0
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    until(lambda: (now := controller_of(fleet)) and now.pid != controller.pid, "another controller")
    until(lambda: shown(fleet) == ["local/host:0"], "the fleet without what left")
    return (fleet.folder / machine / "logs" / f"agent-{machine}.jsonl").read_text()


def shown(fleet: Fleet) -> list[str]:
    """Devices of the fleet; none while the controller that would say it is on its way."""
    told = fleet.prism("top", "--once", "--json", ok=False)
    return [device["id"] for device in json.loads(told.stdout)["devices"]] if told.returncode == 0 else []


def says_that_all_was_taken(fleet: Fleet, log: str) -> bool:
    """Else it must say that it gave up; which of the two, with nobody to name a taker, depends on how long a controller
    takes to start."""
    taken = "local has" in log
    assert taken != ("gave up" in log)
    return taken


@pytest.mark.engine
@pytest.mark.slow
def test_a_machine_that_leaves_ends_although_the_controller_is_killed_before_it_names_a_taker(
    fleet: Fleet, demo_models: Path
) -> None:
    fleet.prism("load", MODEL, "--device", "b/host:0")
    first, _ = said(fleet, demo_models, SAID)
    fleet.prism("unload", MODEL)
    controller = controller_of(fleet)
    assert controller is not None
    controller.suspend()
    log = end_without_its_controller(fleet, "b", begin_leaving(fleet, "b"))
    _, cached = said(fleet, demo_models, f"{SAID}{first} and then")
    assert cached >= PIECES * 64 if says_that_all_was_taken(fleet, log) else cached < PIECES * 64
    fleet.prism("unload", MODEL)
    until(lambda: books_are_exact(fleet), "exact books")


def received(hosts: Hosts, host: int) -> int:
    """Bytes that came to it so far."""
    read = subprocess.run(hosts.command(host, ["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True)
    line = next(line for line in read.stdout.splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[0])


def agent_of(fleet: Fleet, machine: str) -> psutil.Process | None:
    for process in fleet.family(machine):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "prism.node.main" in process.cmdline():
                return process
    return None


@pytest.mark.engine
@pytest.mark.net
def test_what_a_killed_agent_has_not_sent_is_computed(hosts: Hosts, apart: Fleet, demo_models: Path) -> None:
    apart.prism("load", MODEL, "--device", "local/host:0")
    first, _ = said(apart, demo_models, SAID)
    apart.prism("unload", MODEL)
    kept, agent = pool_of(apart, "local").use(), agent_of(apart, "local")
    assert kept.pieces > PIECES and agent is not None
    hosts.set_rate(1, SLOW_MBIT)
    before = received(hosts, 1)
    load = [*PRISM, "load", MODEL, "--device", "b/host:0", "--state-dir", str(apart.folder / "local")]
    with subprocess.Popen([*apart.hosts[0].prefix, *load], cwd=REPO) as loading:
        until(lambda: received(hosts, 1) - before > kept.file_bytes // 3, "its KV being on the way")
        agent.kill()
        assert loading.wait(PATIENCE_S) == 0
    assert pool_of(apart, "b").use().file_bytes < kept.file_bytes, "in mid-copy"
    hosts.set_rate(1, MBIT)
    following = f"{SAID}{first} and then"
    second, cached = said(apart, demo_models, following)
    assert cached < PIECES * 64
    until(lambda: agent_of(apart, "local"), "the next agent")
    apart.ready("local")
    until(lambda: "local" in {d["id"].split("/")[0] for d in devices(apart)}, "its machine being back")
    apart.prism("unload", MODEL)
    # Nothing was lost for good: what the dead agent had stored is with the next one.
    apart.prism("load", MODEL, "--device", "local/host:0")
    _, cached = said(apart, demo_models, f"{following}{second} and so on")
    assert cached >= PIECES * 64
    apart.prism("unload", MODEL)
    until(lambda: books_are_exact(apart), "exact books")


@pytest.mark.engine
@pytest.mark.net
def test_what_is_taken_while_the_controller_is_killed_is_found(hosts: Hosts, apart: Fleet, demo_models: Path) -> None:
    """The taker is named, and has some of it: nobody needs a controller for the rest."""
    apart.prism("load", MODEL, "--device", "b/host:0")
    first, _ = said(apart, demo_models, SAID)
    apart.prism("unload", MODEL)
    kept, before = pool_of(apart, "b").use(), received(hosts, 0)
    hosts.set_rate(1, SLOW_MBIT)
    family = begin_leaving(apart, "b")
    until(lambda: received(hosts, 0) - before > kept.file_bytes // 3, "its KV being on the way")
    log = end_without_its_controller(apart, "b", family)
    assert "local has" in log and "gave up" not in log
    _, cached = said(apart, demo_models, f"{SAID}{first} and then")
    assert cached >= PIECES * 64
    apart.prism("unload", MODEL)
    until(lambda: books_are_exact(apart), "exact books")
