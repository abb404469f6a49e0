"""Each verb asks the admin API for the right thing and prints it, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from prism.cli import growing
from prism.cli.arriving import line
from prism.cli.errors import Exit
from prism.cli.ps import layers, weights
from tests.cli.conftest import COLD, DEVICE, MODEL, FakeServer

Run = Callable[..., Result]


def test_ls(server: FakeServer, prism: Run) -> None:
    server.answers["GET /admin/models"] = {"models": [MODEL, COLD]}
    shown = prism("ls")
    assert shown.exit_code == 0
    for part in ("org/chat (pinned)", "ready", "500ms", "50ms", "3.0 GiB", "cold", "inactive"):
        assert part in shown.output
    assert "cold" not in prism("ls", "--state", "ready").output
    assert [model["name"] for model in json.loads(prism("ls", "--json").output)] == ["org/chat", "cold"]
    refused = prism("ls", "--state", "nonsense")
    assert refused.exit_code == Exit.USAGE
    assert "nonsense" in refused.output and "inactive" in refused.output


def test_ps(server: FakeServer, prism: Run) -> None:
    waiting = {**COLD, "name": "wanted", "state": "loading", "waiting": 7}
    server.answers["GET /admin/models"] = {"models": [MODEL, COLD, waiting]}
    shown = prism("ps").output
    for part in ("MODEL", "org/chat", "local/host:0", "3.0 GiB", "256.0 MiB", "97.5%", "wanted", "loading", "7"):
        assert part in shown
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["org/chat"].endswith("now"), "a request of it runs"
    assert lines["wanted"].endswith("ago")
    assert "cold" not in shown
    assert "48.0 MiB" in lines["org/chat"], "what it has borrowed"
    assert "org/chat: prompts larger than local/host:0 have 40.0 MiB in host memory, 8.0 MiB lent" in shown
    assert len(json.loads(prism("ps", "--json").output)) == 2
    assert "LAYERS" not in shown
    pair = [
        {"layers": 32, "held_layers": 32, "peers": [], "leaders": ["n/cuda:1"]},
        {"layers": 32, "held_layers": 3, "peers": ["n/cuda:0"], "leaders": []},
    ]
    replicas = [{**MODEL["replicas"][0], "remote": remote} for remote in pair]
    server.answers["GET /admin/models"] = {"models": [{**MODEL, "replicas": replicas}, waiting]}
    shown = prism("ps").output
    assert "32/32 for n/cuda:1" in shown and "3/32 over n/cuda:0" in shown, "they are on another machine"
    server.answers["GET /admin/models"] = {"models": [COLD]}
    assert "no model is loaded" in prism("ps").output
    gone, well = {"id": "n/cuda:1", "fault": "Xid 79"}, {"id": "n/cuda:0", "fault": ""}
    server.answers["GET /admin/devices"] = {"devices": [well, gone]}
    shown = prism("ps").output
    assert "n/cuda:1 is out of service: Xid 79" in shown and "cuda:0" not in shown
    server.answers["GET /admin/models/cold"] = COLD
    assert "n/cuda:1 is out of service: Xid 79" in prism("show", "cold").output


def test_store_pool(server: FakeServer, prism: Run) -> None:
    entry = {
        "model": "a",
        "fingerprint": "0" * 32,
        "layout": "raw",
        "bytes": 1 << 20,
        "home": "x",
        "copies": ["x", "y"],
    }
    lost = {**entry, "model": "b", "home": None, "copies": []}
    machine = {"node": "x", "pool_bytes": 1 << 20, "host_bytes": 3 << 20}
    server.answers["GET /admin/pool"] = {"entries": [entry, lost], "machines": [machine]}
    shown = prism("store", "pool").output
    for part in ("x, y", "no room", "x: 3.0 MiB of weights in memory, 1.0 MiB kept", "1.50 copies per byte"):
        assert part in shown
    assert json.loads(prism("store", "pool", "--json").output)["machines"] == [machine]
    server.answers["GET /admin/pool"] = {"entries": [], "machines": []}
    assert "no machine of the fleet has packed weights" in prism("store", "pool").output


def test_show(server: FakeServer, prism: Run) -> None:
    decision = {"at_s": 1.0, "do": "Activate", "devices": ["local/host:0"], "reason": {"code": "demand", "waiting": 3}}
    server.answers["GET /admin/models/org%2Fchat"] = {**MODEL, "decisions": [decision]}
    shown = prism("show", "org/chat")
    for part in ("/models/chat", "500ms, met 97.5%", "4096 tokens", "1.25/s", "Activate", "demand (waiting=3)"):
        assert part in shown.output
    assert json.loads(prism("show", "org/chat", "--json").output)["context_tokens"] == 4096


@pytest.mark.parametrize(
    ("arguments", "call", "body", "said"),
    [
        (["load", "a"], "POST /admin/models/a/load", {"devices": []}, "a is ready after"),
        (["load", "a", "--device", "host:1"], "POST /admin/models/a/load", {"devices": ["host:1"]}, "copy 120ms"),
        (["unload", "a", "--carry"], "POST /admin/models/a/unload", {"devices": [], "carry": True}, "has left all"),
        (["pin", "../a"], "POST /admin/models/..%2Fa/pin", {}, "is pinned"),
        (["pin", "a"], "POST /admin/models/a/pin", {}, "is pinned"),
        (["pin", "a", "--off"], "POST /admin/models/a/unpin", {}, "no longer pinned"),
        (["drain", "d"], "POST /admin/drain", {"devices": ["d"], "carry": False}, "draining"),
        (["drain", "d", "--off"], "POST /admin/undrain", {"devices": ["d"]}, "in use again"),
        (["cancel", "req/1"], "POST /admin/requests/req%2F1/cancel", {}, "cancelled"),
        (["reload"], "POST /admin/reload", {}, "+new; needs a restart: server.port"),
    ],
)
def test_commands(
    server: FakeServer, prism: Run, arguments: list[str], call: str, body: dict[str, Any], said: str
) -> None:
    reply = {"ok": True, "phases": {"copy": 0.12}, "summary": "+new; needs a restart: server.port"}
    server.answers[call] = reply
    shown = prism(*arguments)
    assert shown.exit_code == 0, shown.output
    assert [asked for asked in server.calls if not asked[0].startswith("GET")] == [(call, body)]
    assert said in shown.output
    assert json.loads(prism(*arguments, "--json").output) == reply


def test_load_of_a_model_that_was_ready_does_not_claim_to_have_loaded_it(server: FakeServer, prism: Run) -> None:
    server.answers["POST /admin/models/a/load"] = {"ok": True, "detail": {"state": "ready", "was_ready": True}}
    assert prism("load", "a").output.splitlines()[-1] == "a was ready already"


def test_reload_after_the_server_was_first_says_what_it_took_over(server: FakeServer, prism: Run) -> None:
    before = {"summary": "+new", "at_s": 1.0}
    server.answers["POST /admin/reload"] = {"ok": True, "summary": "nothing to apply", "applied_before": before}
    shown = prism("reload").output
    assert "taken over" in shown and "+new" in shown and "nothing to apply" not in shown


def arriving(took_s: float | None = None) -> dict[str, Any]:
    sources = {"a": [12, 12 << 20, 0.5], "c": [4, 4 << 20, 0.0]}
    return {"session": "s", "bytes_done": 16 << 20, "bytes_all": 64 << 20, "sources": sources, "took_s": took_s}


def test_load_to_many_says_what_came_from_where(server: FakeServer, prism: Run) -> None:
    server.answers["GET /admin/models/m"] = {"replicas": []}
    why = {"code": "multicast", "way": "chain", "path": "a > b+c", "blocks": 16, "expected_s": 0.5}
    detail = {"state": "ready", "instances": 2, "wanted": 3, "failed": ["d: no memory"], "sends": [{"reason": why}]}
    server.answers["POST /admin/models/m/load"] = {"ok": True, "detail": detail}
    shown = prism("load", "m", "--to", "3")
    assert "weights: multicast (way=chain, path=a > b+c, blocks=16, expected_s=0.5)" in shown.output
    assert shown.exit_code == 1
    assert ("POST /admin/models/m/load", {"instances": 3}) in server.calls
    for part in ("m is on 2 of 3", "d: no memory", "see `prism logs`", "`prism unload MODEL` makes room"):
        assert part in shown.output
    assert prism("load", "m", "--to", "2", "--device", "d").exit_code == 2


def test_load_to_many_shows_layers_that_others_run(
    server: FakeServer, prism: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote: dict[str, Any] = {"layers": 4, "held_layers": 4, "peers": [], "leaders": ["local/host:1"]}
    first = {"devices": ["local/host:0"], "state": "ready", "remote": remote}

    def second(held: int, *peers: str) -> dict[str, Any]:
        remote = {"layers": 4, "held_layers": held, "peers": list(peers), "leaders": []}
        return {"replicas": [first, {"devices": ["local/host:1"], "state": "ready", "remote": remote}]}

    looks = [second(1, "local/host:0"), second(1, "local/host:0"), second(3), second(4)]

    def sleep(seconds: float) -> None:
        server.answers["GET /admin/models/m"] = looks.pop(0)

    monkeypatch.setattr(growing, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    sleep(0.0)
    detail = {"state": "ready", "instances": 2, "wanted": 2, "failed": []}
    server.answers["POST /admin/models/m/load"] = {"ok": True, "detail": detail}
    shown = [line for line in prism("load", "m", "--to", "2").output.splitlines() if line.startswith("host:")]
    assert shown == [
        "host:1: serves with 1 of 4 layers, over host:0",
        "host:1: serves with 3 of 4 layers, waits for the others",
        "host:1: has all layers",
    ]


def test_pipelines_over_machines_are_shown_with_their_names() -> None:
    remote = {"layers": 4, "held_layers": 2, "peers": [], "leaders": ["b/host:1", "c/host:0"]}
    has = "b/host:0: has 2 of 4 layers, runs them for host:1,c/host:0"
    assert growing.line(("b/host:0",), remote, serves=False) == has
    remote = {**remote, "peers": ["c/host:0"], "leaders": []}
    assert growing.line(("b/host:0",), remote) == "b/host:0: serves with 2 of 4 layers, over c/host:0"
    assert layers({"devices": ["b/host:0"], "remote": remote}) == "2/4 over c/host:0"
    assert layers({"devices": ["c/host:1"], "remote": remote}) == "2/4 over host:0"


def test_how_weights_that_arrive_are_shown() -> None:
    assert line("b", arriving(0.5)) == "b: 64.0 MiB in 500ms from a (12 pieces, 24.0 MiB/s), c (4 pieces)"
    replica = {"state": "loading", "weight_bytes": 64 << 20, "arriving": arriving()}
    assert weights(replica) == "16.0 MiB of 64.0 MiB"
    assert weights({**replica, "arriving": arriving(1.0)}) == weights({**replica, "state": "ready"}) == "64.0 MiB"


def test_plan(server: FakeServer, prism: Run) -> None:
    stay = {"model": "a", "action": "stay", "current": ["d0"], "target": ["d0"], "reason": {"code": "stay"}}
    move = {
        "model": "b",
        "action": "move",
        "current": ["d0"],
        "target": ["d1"],
        "reason": {"code": "migration", "gain": 0.25},
    }
    server.answers["GET /admin/plan"] = {"at_s": 1, "policy": "prism", "decisions": [stay, move]}
    shown = prism("plan").output
    assert "migration (gain=0.25)" in shown and "d1" in shown
    assert "stay" not in shown
    assert "stay" in prism("plan", "--all").output
    server.answers["GET /admin/plan"] = {"at_s": 1, "policy": "prism", "decisions": [stay]}
    assert "nothing to do" in prism("plan").output
    server.answers["GET /admin/snapshot"] = {"devices": [], "models": []}
    assert json.loads(prism("plan", "--snapshot").output) == {"devices": [], "models": []}


def test_top(server: FakeServer, prism: Run) -> None:
    server.answers["GET /admin/models"] = {"models": [MODEL]}
    server.answers["GET /admin/devices"] = {"devices": [DEVICE]}
    shown = prism("top", "--once").output
    assert "##################++...." in shown
    for part in ("local/host:0", "3.2 GiB", "4.0 GiB", "1 parked", "org/chat"):
        assert part in shown
    assert json.loads(prism("top", "--once", "--json").output)["devices"] == [DEVICE]


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ((404, error("no model nope; did you mean one?")), Exit.FAILED, "did you mean one?"),
        ((401, error("bad key")), Exit.UNAUTHORIZED, "--key"),
        ((403, error("not an admin key")), Exit.UNAUTHORIZED, "not an admin key"),
        ((502, b"<html>"), Exit.UNREACHABLE, "no answer of a Prism server"),
        ((200, b"[]"), Exit.UNREACHABLE, "no answer of a Prism server"),
        ((500, error("it broke")), Exit.FAILED, "it broke"),
        ((500, b"Internal Server Error"), Exit.FAILED, "prism logs --level error"),
    ],
)
def test_refusals_have_exit_codes(
    server: FakeServer, prism: Run, answer: tuple[int, Any], code: Exit, said: str
) -> None:
    server.answers["GET /admin/models/nope"] = answer
    shown = prism("show", "nope")
    assert shown.exit_code == code
    assert said in shown.output
    assert "Traceback" not in shown.output


def test_the_key_is_sent(server: FakeServer, prism: Run) -> None:
    server.answers["GET /admin/models"] = {"models": []}
    prism("ls", "--key", "one")
    prism("ls", env={"PRISM_ADMIN_KEY": "two"})
    prism("ls")
    assert server.keys == ["Bearer one", "Bearer two", ""]


def test_requests(server: FakeServer, prism: Run) -> None:
    one = {"id": "r-1", "model": "a", "state": "scheduled", "device": "local/host:0", "waited_s": 0.25, "tokens": 7}
    server.answers["GET /admin/requests"] = {"requests": [one, {**one, "id": "r-2", "model": "b"}]}
    shown = prism("requests", "--model", "a").output
    assert "r-1" in shown and "250ms" in shown and "r-2" not in shown
    assert len(json.loads(prism("requests", "--json").output)) == 2
    assert all(line == line.rstrip() for line in shown.splitlines())
