"""Who is asked to help whom, and told to stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine import load_helpers
from prism.engine.commands import Nudge
from prism.engine.link import WorkerLink
from prism.engine.load_helpers import LoadHelpers
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.memory.gpus import Gpu, GpuSet


class Link:
    def __init__(self, device: DeviceId) -> None:
        self.device = device
        self.told: list[object] = []

    def send(self, command: object) -> None:
        self.told.append(command)


class Fleet:
    """Four devices with a parked worker each."""

    def __init__(self, kind: DeviceKind, directory: Path, most: int) -> None:
        self.names = [DeviceId(f"local/{kind.value}:{i}") for i in range(4)]
        self.helpers = LoadHelpers([DeviceSpec(d, NodeId("local"), kind, 1 << 30) for d in self.names], directory, most)
        self.links = {device: Link(device) for device in self.names}

    def parked_on(self, device: DeviceId) -> WorkerLink | None:
        return cast("WorkerLink | None", self.links.get(device))

    def during(self, *loading: int):  # type: ignore[no-untyped-def]
        return self.helpers.during([self.names[i] for i in loading], self.parked_on)

    def numbers(self, found: dict[DeviceId, list[Link]]) -> dict[int, list[int]]:
        at = self.names.index
        return {at(device): [at(link.device) for link in links] for device, links in found.items()}


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """NVLink joins the first three."""
    joined = {0: (1, 2), 1: (0, 2), 2: (0, 1), 3: ()}
    found = tuple(Gpu(i, f"GPU-{i}", "a GPU", 1, 0, (9, 0), None, joined[i], "") for i in range(4))
    monkeypatch.setattr(load_helpers, "gpus_if_any", lambda: GpuSet((13, 0), found))
    return Fleet(DeviceKind.CUDA, tmp_path, 3)


def test_parked_workers_that_nvlink_reaches_help(gpus: Fleet) -> None:
    with gpus.during(0) as helpers:
        assert gpus.numbers(helpers) == {0: [1, 2]}
    with gpus.during(3) as helpers:
        assert gpus.numbers(helpers) == {3: []}, "nothing joins it to others"
    with gpus.during(0, 1) as helpers:
        assert gpus.numbers(helpers) == {0: [2], 1: []}, "ranks do not help each other"
    del gpus.links[gpus.names[1]]
    with gpus.during(0) as helpers:
        assert gpus.numbers(helpers) == {0: [2]}, "nobody is parked on the other"


def test_no_device_helps_two_and_one_that_loads_itself_stops(gpus: Fleet) -> None:
    with gpus.during(0) as helpers:
        assert gpus.numbers(helpers) == {0: [1, 2]}
        told = gpus.links[gpus.names[1]].told
        with gpus.during(1) as others:
            assert gpus.numbers(others) == {1: []} and told == [Nudge()]
        with gpus.during(3):
            assert told == [Nudge()] and not gpus.links[gpus.names[2]].told
    with gpus.during(1) as helpers:
        assert gpus.numbers(helpers) == {1: [0, 2]}, "all are free again"


def test_none_help_where_it_is_switched_off(gpus: Fleet) -> None:
    gpus.helpers.most = 0
    with gpus.during(0) as helpers:
        assert gpus.numbers(helpers) == {0: []}


def test_virtual_devices_help_where_declared_links_say_that_it_pays(tmp_path: Path) -> None:
    hosts = Fleet(DeviceKind.HOST, tmp_path, 1)
    with hosts.during(0) as helpers:
        assert hosts.numbers(helpers) == {0: []}, "no links are declared"
    links = {"host:0": DeclaredLinks(host=1e6, peer=1e7), "host:1": DeclaredLinks(host=1e6, peer=1e6)}
    write_kv_settings(tmp_path, KvSettings(links=links))
    with hosts.during(0) as helpers:
        assert hosts.numbers(helpers) == {0: [1]}
    with hosts.during(1) as helpers:
        assert hosts.numbers(helpers) == {1: []}, "the way over another device is no faster"


def test_what_it_stands_on_is_read_once(gpus: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked when the pool is made: its library takes its time."""
    monkeypatch.setattr(load_helpers, "gpus_if_any", lambda: SimpleNamespace())
    with gpus.during(0) as helpers:
        assert gpus.numbers(helpers) == {0: [1, 2]}
