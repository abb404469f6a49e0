"""``prism profile`` and ``prism place``: what is asked once is kept, the plan is shown, and loaded when asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from prism.config.profiles import Profile, ProfileStore
from prism.config.state import StateDir
from prism.sim.profile import BURSTS
from tests.cli.conftest import FakeServer

Run = Callable[..., Result]
GIB = 1 << 30


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Two lenders and two borrowers whose profiles stand in the state directory."""
    paths = ["meta-llama/Llama-3.2-1B-Instruct"] * 2 + ["meta-llama/Llama-3.1-8B-Instruct"] * 2
    models = [{"name": f"m{i}", "path": path, "slo": {"ttft": "1s", "tpot": "100ms"}} for i, path in enumerate(paths)]
    file = tmp_path / "catalog.yaml"
    file.write_text(json.dumps({"models": models}))
    store = ProfileStore(StateDir.at(tmp_path / "state").profiles)
    for index in range(4):
        free_bytes = 40 * GIB if index < 2 else 0
        swap_bytes = dict.fromkeys(BURSTS, 0 if index < 2 else 30 * GIB)
        question = {"gpu": "H100", "tp": 1, "lengths": "sharegpt", "target": 0.99, "ttft_s": 1.0, "tpot_s": 0.1}
        found = Profile(model=f"m{index}", rate_rps=5.0, free_bytes=free_bytes, swap_bytes=swap_bytes, **question)
        store.put(found)
    return file


def test_lenders_stand_beside_borrowers(catalog: Path, prism: Run) -> None:
    at = ("place", str(catalog), "--servers", "2", "--gpus", "2", "--state-dir", str(catalog.parent / "state"))
    plan = json.loads(prism(*at, "--json").output)
    for server in plan["servers"]:
        (pair,) = server["lending"]
        assert pair["nbytes"] == 30 * GIB
        assert {pair["borrower"], pair["lender"]} == {need["model"] for need in server["models"]}
    shown = prism(*at).output
    assert "2 of 2 borrowing devices have a lender in their server, 100.0% of the bytes" in shown


def test_a_fleet_that_is_too_small_is_refused(catalog: Path, prism: Run) -> None:
    shown = prism("place", str(catalog), "--servers", "1", "--gpus", "2", "--state-dir", str(catalog.parent / "state"))
    assert shown.exit_code == 1
    assert "4 devices are needed, 1 x 2 are there" in shown.output


def test_the_plan_becomes_the_first_placement(catalog: Path, prism: Run, server: FakeServer) -> None:
    ids = [f"{node}/cuda:{index}" for node in ("b", "a") for index in (10, 2)]
    server.answers["GET /admin/devices"] = {"devices": [{"id": i, "node": i.partition("/")[0]} for i in ids]}
    for index in range(4):
        server.answers[f"POST /admin/models/m{index}/load"] = {"ok": True}
    at = ("place", str(catalog), "--servers", "2", "--gpus", "2", "--state-dir", str(catalog.parent / "state"))
    assert prism(*at, "--load").exit_code == 0
    loaded = {what: body["devices"] for what, body in server.calls if what.startswith("POST")}
    assert sorted(device for devices in loaded.values() for device in devices) == sorted(ids)
    plan = json.loads(prism(*at, "--json").output)
    first = {need["model"] for need in plan["servers"][0]["models"]}
    assert {d.partition("/")[0] for m in first for d in loaded[f"POST /admin/models/{m}/load"]} == {"a"}
    shown = prism("place", str(catalog), "--servers", "3", "--gpus", "2", "--load", *at[6:])
    assert shown.exit_code == 1
    assert "the plan has 3 servers of 2 devices, the running fleet 2" in shown.output


def test_profiles_are_made_and_kept(catalog: Path, prism: Run) -> None:
    state = catalog.parent / "fresh"
    at = ("profile", str(catalog), "m0", "--state-dir", str(state), "--gpu", "cpu", "--json")
    refused = prism(*at)
    assert refused.exit_code == 1
    assert "a shard of m0 has" in refused.output
    assert not StateDir.at(state).profiles.exists()
    assert prism("profile", str(catalog), "nobody", "--state-dir", str(state)).exit_code == 1
