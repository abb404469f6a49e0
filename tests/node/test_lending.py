"""What devices lend: as their models allow, told by lender and borrower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prism import memory
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.specs import DeviceKind, DeviceRates, DeviceSpec, LendingRole, ModelProfile, ModelSpec
from prism.kv.lent_shelf import borrower_name
from prism.node.lending import DeviceLending
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics, render
from tests.integration.fake_system import model

MIB = 1 << 20
DEVICES = [DeviceId(f"n/host:{i}") for i in range(2)]


def accounts(folder: Path) -> dict[DeviceId, memory.Device]:
    return {device: memory.open_device(f"host:{i}", 64 * MIB, account_dir=folder) for i, device in enumerate(DEVICES)}


def bursty(name: str, burst_bytes: int) -> ModelSpec:
    profile = ModelProfile(DeviceKind.HOST, DeviceRates(1e-3, 1e-5, 1e10), 1e3, burst_bytes)
    return replace(model(name), profile=profile)


def test_a_device_lends_unless_a_model_on_it_is_to_lend_nothing(tmp_path: Path) -> None:
    found = accounts(tmp_path)
    lending = DeviceLending(found, 0.25)
    offered = [(48 * MIB, 48 * MIB), (0, 48 * MIB), (48 * MIB, 48 * MIB)]
    selfish = replace(model("a"), lending=LendingRole.BORROWER)
    for here, wanted in zip(([], [(selfish, DEVICES[:1]), (model("b"), DEVICES)], []), offered, strict=True):
        lending.settle(here)
        assert tuple(found[d].offered_bytes() for d in DEVICES) == wanted
    lending.settle([(bursty("a", 24 * MIB), DEVICES), (bursty("b", 16 * MIB), DEVICES[:1])])
    assert [found[d].offered_bytes() for d in DEVICES] == [24 * MIB, 40 * MIB], (
        "bursts are kept back where they are more"
    )
    lending.settle([(bursty("a", 1 * MIB), DEVICES), (bursty("b", 99 * MIB), DEVICES[1:])])
    assert [found[d].offered_bytes() for d in DEVICES] == [48 * MIB, 0]
    nothing = DeviceLending(found, None)
    nothing.settle([(model("b"), DEVICES)])
    assert [found[d].offered_bytes() for d in DEVICES] == [0, 0]
    assert [role for role in LendingRole if role.lends] == [LendingRole.BOTH, LendingRole.LENDER]
    assert [role for role in LendingRole if role.borrows] == [LendingRole.BOTH, LendingRole.BORROWER]


def test_what_is_lent_is_told_by_lender_and_borrower_until_it_is_given_back(tmp_path: Path) -> None:
    found = accounts(tmp_path)
    lending = DeviceLending(found, 0.0)
    borrower = found[DEVICES[1]].register(borrower_name("host-0-1", "llama"))
    region = borrower.lent_region(8 * MIB)
    region.commit(4 * MIB)
    assert lending.lent() == {DEVICES[0]: {}, DEVICES[1]: {"llama": 4 * MIB}}
    assert lending.borrowed_bytes(ModelName("llama")) == 4 * MIB and lending.borrowed_bytes(ModelName("other")) == 0
    metrics = Metrics()
    measures = NodeMeasures(metrics, [DeviceSpec(d, NodeId("n"), DeviceKind.HOST, 64 * MIB) for d in DEVICES])
    for shown in ("4.194304e+06", "0"):
        measures.lent(lending.lent())
        text = render(metrics).decode()
        assert f'prism_lent_bytes{{borrower="llama",lender="n/host:1"}} {shown}' in text
        region.decommit()
    borrower.close()
