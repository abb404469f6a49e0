"""The server of a comparison, between two points: what is told to it until it is in its first state."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.slo.server import Server, ServerFailed


class AnsweringServer(Server):
    """Its admin calls, answered from ``loaded``; ``ahead`` comes when the first one leaves, as a model that is loaded
    ahead does."""

    def __init__(self, loaded: list[str], ahead: str = "", stays: bool = False) -> None:
        self.loaded, self.ahead, self.stays = loaded, ahead, stays
        self.unloaded: list[str] = []

    def admin(self, path: str) -> dict[str, Any]:
        if path == "requests":
            return {"requests": []}
        replicas = {name: [{"state": "ready"}] for name in self.loaded}
        return {"models": [{"name": name, "replicas": replicas.get(name, [])} for name in ("m0", "m1", "m9")]}

    def command(self, path: str) -> dict[str, Any]:
        name = path.split("/")[1]
        self.unloaded.append(name)
        if not self.stays:
            self.loaded.remove(name)
        if self.ahead:
            self.loaded.append(self.ahead)
            self.ahead = ""
        return {"ok": True}

    def tail(self, lines: int = 25) -> str:
        return ""


def test_every_model_is_told_to_leave_once() -> None:
    server = AnsweringServer(["m0", "m1"])
    server.settle(unload=True)
    assert server.unloaded == ["m0", "m1"]


def test_a_model_that_comes_while_others_leave_is_told_to_leave_too() -> None:
    server = AnsweringServer(["m0", "m1"], ahead="m9")
    server.settle(unload=True)
    assert server.unloaded == ["m0", "m1", "m9"]
    assert server.loaded == []


def test_who_does_not_leave_is_named() -> None:
    with pytest.raises(ServerFailed, match=r"still loaded: \{'m1': \['ready'\]\}"):
        AnsweringServer(["m1"], stays=True).settle(unload=True, timeout_s=0.0)


def test_models_stay_where_the_policy_has_them_stay() -> None:
    server = AnsweringServer(["m0"])
    server.settle(unload=False)
    assert server.unloaded == []
