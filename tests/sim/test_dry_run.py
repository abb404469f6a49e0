"""Dry runs: from a live system's snapshot on, under any policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId, ModelName, node_of
from prism.core.settings import PolicySettings
from prism.core.views import InstanceState
from prism.sim.cluster_file import parse_cluster
from prism.sim.dry_run import (
    Snapshot,
    SnapshotDevice,
    SnapshotInstance,
    SnapshotModel,
    dry_run,
    dry_run_file,
    read_snapshot,
)
from tests.sim.helpers import llamas

PRISM = PolicySettings.named("prism")


def snapshot() -> Snapshot:
    one, two = DeviceId("h/cuda:0"), DeviceId("h/cuda:1")
    active = SnapshotInstance(7, (one,), InstanceState.READY, running=3, waiting=1)
    return Snapshot(
        devices=(SnapshotDevice(one, "h", 40 << 30), SnapshotDevice(two, "h", 40 << 30)),
        models=(
            SnapshotModel(ModelName("m0"), 2.0, 0, False, (active,)),
            SnapshotModel(ModelName("m1"), 0.5, waiting=4),
        ),
    )


@pytest.mark.parametrize("policy", ["prism", "qlm"])
def test_dry_run_starts_from_the_snapshot(policy: str) -> None:
    found = dry_run(snapshot(), llamas(2), PolicySettings.named(policy), horizon_s=20.0)
    first = found.actions[0]
    assert (first.action, first.model) == ("activate", "m1")
    assert found.actions[0].devices == ("h/cuda:1",)
    assert found.requests >= 8
    again = dry_run(snapshot(), llamas(2), PolicySettings.named(policy), horizon_s=20.0)
    assert again == found


def test_snapshot_file_is_the_controllers_view(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(snapshot()))
    data = json.loads(path.read_bytes())
    data["instances"], data["at_s"] = [], 1.0  # keys that the controller adds
    path.write_text(json.dumps(data))
    assert read_snapshot(path) == snapshot()
    path.write_text("{}")
    with pytest.raises(InvalidValue, match="snapshot"):
        read_snapshot(path)


def test_devices_keep_their_nodes_in_any_order() -> None:
    """Two nodes whose devices are listed in turn: a model over both GPUs of one node stays there."""
    devices = [SnapshotDevice(DeviceId(f"{node}/cuda:{i}"), node, 40 << 30) for i in (0, 1) for node in ("a", "b")]
    here = SnapshotInstance(1, (DeviceId("b/cuda:0"), DeviceId("b/cuda:1")), InstanceState.READY, running=2)
    models = (replace(llamas(1)[0], tp=2), llamas(2)[1])
    state = Snapshot(tuple(devices), (SnapshotModel(ModelName("m0"), 1.0, 0, False, (here,)), waiting("m1")))
    found = dry_run(state, models, PRISM, horizon_s=10.0)
    assert found.ttft > 0.0
    [first, *_] = found.actions
    assert (first.model, node_of(first.devices[0])) == ("m1", "a")


def waiting(name: str) -> SnapshotModel:
    return SnapshotModel(ModelName(name), 0.5, 3)


def test_drained_devices_and_pins_are_respected() -> None:
    one, two = (SnapshotDevice(DeviceId(f"h/cuda:{i}"), "h", 40 << 30, "", i == 1) for i in (0, 1))
    found = dry_run(Snapshot((one, two), (waiting("m1"),)), llamas(2), PRISM, horizon_s=10.0)
    assert [a.devices for a in found.actions] == [("h/cuda:0",)]
    pinned = SnapshotModel(ModelName("m0"), 0.0, 0, True)
    found = dry_run(Snapshot((one, two), (pinned,)), llamas(2), PRISM, horizon_s=10.0)
    assert [(a.action, a.model) for a in found.actions] == [("activate", "m0")]
    here = SnapshotInstance(7, (one.id,), InstanceState.READY)
    found = dry_run(
        Snapshot((one,), (SnapshotModel(ModelName("m0"), 0.0, 0, True, (here,)),)),
        tuple(replace(m, pinned=True) for m in llamas(1)),
        PRISM,
        horizon_s=10.0,
    )
    assert not found.actions  # it is there already


def test_muxserve_plans_for_the_rates_that_were_seen() -> None:
    """Most demanding first: the map must know who is in demand."""
    devices = tuple(SnapshotDevice(DeviceId(f"h/cuda:{i}"), "h", 40 << 30) for i in (0, 1))
    rates = {"m0": 0.1, "m1": 5.0, "m2": 5.0}
    state = Snapshot(devices, tuple(SnapshotModel(ModelName(n), r, 1) for n, r in rates.items()))
    found = dry_run(state, llamas(3), PolicySettings.named("muxserve"), horizon_s=20.0)
    places = {a.model: a.devices for a in found.actions if a.action == "activate"}
    assert places["m1"] != places["m2"]


def test_models_that_the_catalog_lacks_are_noted() -> None:
    found = dry_run(Snapshot(snapshot().devices, (waiting("gone"), waiting("m0"))), llamas(1), PRISM, horizon_s=5.0)
    assert found.notes == ("left out, because the catalog does not have them: gone",)


def test_the_cluster_file_gives_kinds_and_timing_but_no_faults() -> None:
    base = parse_cluster(
        {
            "groups": [{"gpu": "B200", "nodes": 3, "gpus_per_node": 8}],
            "timing": {"relayout": "9s"},
            "faults": [{"at": "0s", "kind": "node_fails", "target": "node1"}],
        },
        "test",
    )
    slow = dry_run(snapshot(), llamas(2), PRISM, base, horizon_s=20.0)
    assert slow.ttft < dry_run(snapshot(), llamas(2), PRISM, horizon_s=20.0).ttft


@pytest.mark.parametrize(("horizon_s", "seed", "key"), [(0.0, 0, "horizon-s"), (1.0, -1, "seed")])
def test_bad_options_are_named(horizon_s: float, seed: int, key: str) -> None:
    with pytest.raises(InvalidValue, match=key):
        dry_run(snapshot(), llamas(2), PRISM, horizon_s=horizon_s, seed=seed)


def test_an_instance_on_an_unknown_device_is_named(tmp_path: Path) -> None:
    state = msgspec.structs.replace(snapshot(), devices=snapshot().devices[1:])
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(state))
    with pytest.raises(InvalidValue, match=r"s\.json: instances\.devices: .*m0.*h/cuda:0.*choices: h/cuda:1"):
        dry_run_file(path, catalog=path, cluster=None, policy=None, horizon_s=1.0, seed=0)
