"""What must hold of a server after everything that was done to it."""

from __future__ import annotations

from pathlib import Path

import psutil

from .server import DEMOS, Server, complete, greedy, until


def all_is_well_again(server: Server, demo_models: Path, shapes: int = 1) -> None:
    """Everything serves, no request is left, every byte is back, and no process more than there should be: two engines
    a device, one of them parked, of each of ``shapes`` (alone, or in a group of ranks)."""
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
        engines = set(server.pids("prism: engine"))
        others = [p for p in server.family() if p.pid not in supervised | engines]
        return all(tracks(p, engines) for p in others) and len(engines) <= 2 * shapes * len(devices())

    until(only_engines, "every process being one that should be")


def tracks(process: psutil.Process, engines: set[int]) -> bool:
    """Python's own process beside one that shares memory with the other ranks of its engine; ends with it."""
    try:
        return process.ppid() in engines and "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
