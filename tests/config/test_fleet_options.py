"""Devices and addresses as the command lines of a fleet's machines take them."""

from __future__ import annotations

import pytest

from prism.config.addresses import FleetAddress, parse_fleet_address
from prism.config.devices import parse_devices
from prism.core.errors import InvalidValue
from prism.core.ids import NodeId

NODE = NodeId("b")


def found(*texts: str, gpus: dict[int, int] | None = None) -> list[tuple[str, int]]:
    return [(d.id, d.memory_bytes) for d in parse_devices(texts, NODE, gpus or {})]


def test_devices_of_a_node() -> None:
    assert found("host:0=64MiB", "host:3=1GiB") == [("b/host:0", 64 << 20), ("b/host:3", 1 << 30)]
    assert found(gpus={1: 1000, 0: 2000}) == [("b/cuda:0", 1900), ("b/cuda:1", 950)]
    assert found("cuda:1", "host:0=1KiB", gpus={1: 1000}) == [("b/cuda:1", 950), ("b/host:0", 1024)]
    assert found("cuda:0=1KiB", gpus={0: 2000}) == [("b/cuda:0", 1024)]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([], "no GPU"),
        (["host:0"], "needs a size"),
        (["tpu:0"], "is no device"),
        (["host:0=much"], "is not a size"),
        (["cuda:7"], "not on this machine"),
        (["cuda:0=1GiB"], "more than the GPU has"),
        (["host:0=1KiB", "host:0=2KiB"], "twice"),
    ],
)
def test_wrong_devices_say_why(texts: list[str], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        found(*texts, gpus={0: 2000} if texts else {})


def test_fleet_addresses() -> None:
    assert parse_fleet_address("10.0.0.1") == FleetAddress("10.0.0.1", 6380)
    assert parse_fleet_address("node-1.example:7000") == FleetAddress("node-1.example", 7000)
    for wrong in ("", "0.0.0.0", "*:6380", "10.0.0.1:x", "10.0.0.1:0", ":6380"):
        with pytest.raises(InvalidValue):
            parse_fleet_address(wrong)
