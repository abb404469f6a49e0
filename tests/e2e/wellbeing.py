"""What must hold of a server after everything that was done to it."""

from __future__ import annotations

from pathlib import Path

from .server import DEMOS, Server, complete, greedy, until


def all_is_well_again(server: Server, demo_models: Path) -> None:
    """Everything serves, no request is left, every byte is back, and no process more than there should be: two engines
    a device, one of them parked."""
    names = ("front-0", "front-1", "agent", "controller", "valkey", "zygote")
    until(lambda: set(server.running()) == set(names), "all processes running")
    for model in DEMOS:
        again = server.client.with_options(max_retries=5)  # a kept connection may lead to a dead worker
        assert complete(again, model, "again", 8) == greedy(str(demo_models / model), "again", 8)
    until(lambda: not server.admin("requests")["requests"], "no request being open")
    until(lambda: server.queued() == 0, "the queues being empty")
    for model in DEMOS:
        server.admin(f"models/{model}/unload", {})
    devices = lambda: server.admin("devices")["devices"]  # noqa: E731
    until(lambda: all(d["free_bytes"] == d["capacity_bytes"] for d in devices()), "all memory coming back")

    def only_engines() -> bool:
        supervised = {server.process.pid, *server.running().values(), *server.pids("prism: standby")}
        engines = {p.pid for p in server.family()} - supervised
        return engines == set(server.pids("prism: engine")) and len(engines) <= 2 * len(devices())

    until(only_engines, "every process being one that should be")
