"""Operators' calls, with a scripted controller behind the command stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from fastapi.routing import APIRoute

import prism.cli
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import whole_model
from prism.core.views import ClusterView, DeviceView, InstanceState, InstanceView, ModelView
from prism.server.admin import admin_router
from prism.sim.dry_run import Snapshot
from prism.wire.commands import AdminCommand
from tests.server.live import ADMIN_KEY, LiveFront
from tests.server.tiny import CONTEXT

AUTH = {"authorization": f"Bearer {ADMIN_KEY}"}


def post(live: LiveFront, path: str, **body: Any) -> tuple[int, Any]:
    answer = live.http.post(f"/admin/{path}", json=body, headers=AUTH)
    return answer.status_code, answer.json()


def test_commands_reach_the_controller(live: LiveFront, commands: list[AdminCommand]) -> None:
    assert post(live, "models/quick/load", devices=["local/host:0"]) == (
        200,
        {"ok": True, "detail": {"verb": "load"}, "phases": {"load": 0.1}},
    )
    assert post(live, "models/org/thinker:7b/pin")[0] == 200
    assert post(live, "models/fast/unpin")[0] == 200
    assert post(live, "drain", devices=["local/host:0"], carry=True)[0] == 200
    assert post(live, "undrain", devices=["local/host:0"])[0] == 200
    told = [(c.verb, c.model, c.devices, c.carry) for c in commands]
    assert told == [
        ("load", "fast", ["local/host:0"], False),
        ("pin", "org/thinker:7b", [], False),
        ("unpin", "fast", [], False),
        ("drain", "", ["local/host:0"], True),
        ("undrain", "", ["local/host:0"], False),
    ]


def test_a_refusal_says_why(live: LiveFront, commands: list[AdminCommand]) -> None:
    status, answer = post(live, "models/fast/unload", carry=True)
    assert status == 409 and answer["error"]["message"] == "it is pinned", "in words, without a class's name"


def test_models_are_listed_as_of_a_change_that_another_process_applied(live: LiveFront) -> None:
    assert live.http.get("/admin/models", headers=AUTH).status_code == 200
    before = live.front.catalog
    live.run(live.store.bump_catalog_generation())
    assert live.http.get("/admin/models", headers=AUTH).status_code == 200
    assert live.front.catalog is not before


def test_plan_and_reload(live: LiveFront, commands: list[AdminCommand]) -> None:
    assert live.http.get("/admin/plan", headers=AUTH).json() == {"verb": "plan"}
    before = live.front.catalog
    assert post(live, "reload")[1]["ok"]
    assert live.front.catalog is not before and live.front.catalog == before


def test_views_join_catalog_and_cluster(live: LiveFront) -> None:
    instance = {
        "generation": 1,
        "devices": ["local/host:0"],
        "state": "ready",
        "running": 1,
        "waiting": 2,
        "kv_bytes": 10,
        "since_s": 5.0,
        "idle_since_s": None,
    }
    cluster = {
        "at_s": 1.0,
        "policy": "prism",
        "devices": [
            {
                "id": "local/host:0",
                "node": "local",
                "domain": "",
                "capacity_bytes": 1000,
                "free_bytes": 400,
                "draining": False,
                "weight_bytes": 500,
                "weighted_rate": 5.0,
            }
        ],
        "models": [{"name": "fast", "rate_per_s": 2.0, "weight_bytes": 500, "pinned": True, "instances": [instance]}],
        "instances": [
            {
                "model": "fast",
                "generation": 1,
                "devices": ["local/host:0"],
                "state": "ready",
                "weight_bytes": 500,
                "kv_bytes": 100,
                "running": 3,
                "waiting": 1,
            }
        ],
        "inactive": {"cold": 4},
    }
    live.run(live.store.put_doc("cluster", json.dumps(cluster)))
    models = {m["name"]: m for m in live.http.get("/admin/models", headers=AUTH).json()["models"]}
    fast, cold = models["fast"], models["cold"]
    assert (fast["state"], fast["pinned"], fast["running"], fast["waiting"], fast["kv_bytes"]) == (
        "ready",
        True,
        3,
        1,
        100,
    )
    assert fast["replicas"][0]["state"] == "ready" and fast["replicas"][0]["weight_bytes"] == 500
    assert (cold["state"], cold["waiting"], cold["replicas"]) == ("waiting", 4, [])
    [device] = live.http.get("/admin/devices", headers=AUTH).json()["devices"]
    assert (device["kind"], device["kv_bytes"], device["engines"]["active"], device["kvpr"]) == ("host", 100, 1, 0.01)
    shown = live.http.get("/admin/models/quick", headers=AUTH).json()
    assert shown["name"] == "fast" and shown["config"]["name"] == "fast" and shown["decisions"] == []
    assert shown["context_tokens"] == CONTEXT, "as its files say: the catalog does not"


def test_a_snapshot_is_what_a_dry_run_starts_from(live: LiveFront) -> None:
    instance = InstanceView(
        Generation(3), whole_model([DeviceId("local/host:0")]), InstanceState.READY, 1, 2, 100, 5.0, None
    )
    device = DeviceView(DeviceId("local/host:0"), NodeId("local"), "", 1000, 400, True, 500, 5.0)
    model = ModelView(ModelName("fast"), 2.0, 0.5, 500, 0, 1, True, 4, 0.1, 1.0, (instance,))
    live.run(live.store.put_doc("cluster", json.dumps(ClusterView(1.0, "prism", (device,), (model,)).as_dict())))
    found = live.http.get("/admin/snapshot", headers=AUTH)
    assert found.status_code == 200
    snapshot = msgspec.json.decode(found.content, type=Snapshot)
    assert snapshot.devices[0].draining and snapshot.devices[0].capacity_bytes == 1000
    assert (snapshot.models[0].pinned, snapshot.models[0].rate_per_s, snapshot.models[0].waiting) == (True, 2.0, 4)
    assert snapshot.models[0].instances[0].running == 1


def test_every_call_of_the_command_line_has_a_route(live: LiveFront) -> None:
    """The verbs' own tests answer for the server."""
    sources = "".join(file.read_text("utf-8") for file in Path(prism.cli.__path__[0]).glob("*.py"))
    called = set(re.findall(r"client\.(get|post)\(\"([a-z]+)\"", sources))
    served = {
        (method.lower(), route.path.removeprefix("/admin/"))
        for route in admin_router(live.front).routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert len(called) > 5
    assert called <= served


def test_status_requests_and_wellness(live: LiveFront) -> None:
    live.run(live.store.put_doc("status", json.dumps({"version": "1", "processes": []})))
    status = live.http.get("/admin/status", headers=AUTH).json()
    assert status["redis"]["ok"] and status["version"] == "1"
    assert isinstance(live.http.get("/admin/requests", headers=AUTH).json()["requests"], list)
    assert live.http.get("/health").json() == {"status": "ok"}
    ready = live.http.get("/readiness")
    assert ready.status_code == 200 and ready.json() == {"ready": True, "missing": []}
    live.client().completions.create(model="fast", prompt="x", max_tokens=2)
    text = live.http.get("/metrics").text
    assert 'prism_requests_total{device="local/host:0",model="fast",outcome="ok"}' in text
    assert "prism_ttft_seconds_bucket" in text


def test_devices_out_of_service_are_named_to_whoever_asks_after_the_health(live: LiveFront) -> None:
    devices = [
        {"id": f"n/cuda:{i}", "node": "n", "capacity_bytes": 9, "free_bytes": 9, "weight_bytes": 0, "draining": True}
        | {"weighted_rate": 0.0}
        for i in range(2)
    ]

    def broken(*numbers: int) -> None:
        faults = {f"n/cuda:{i}": "fell off the bus" for i in numbers}
        live.run(live.store.put_doc("cluster", json.dumps({"devices": devices, "faults": faults})))

    broken(1)
    found = live.http.get("/health")
    assert found.status_code == 200, "the worker lives"
    assert found.json() == {"status": "degraded", "faults": {"n/cuda:1": "fell off the bus"}}
    assert live.http.get("/readiness").status_code == 200, "the other device serves"
    broken(0, 1)
    ready = live.http.get("/readiness")
    assert ready.status_code == 503
    assert "n/cuda:0 is out of service: fell off the bus" in ready.json()["missing"]
    broken()
    assert live.http.get("/health").json() == {"status": "ok"} and live.http.get("/readiness").status_code == 200
    live.run(live.store.put_doc("cluster", "{}"))


def test_the_admin_key_is_needed(live: LiveFront) -> None:
    assert live.http.get("/admin/models").status_code == 401
    assert live.http.get("/admin/models", headers={"authorization": "Bearer wrong"}).status_code == 401
