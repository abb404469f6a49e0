"""Question: how much longer than its links need does `load --to N` take, and how long does a stream stand still when
its machine dies or leaves?

    python -m benchmarks.e2e.fleet [--nodes 2] [--mbit 200]

A prism-serve and some prism-nodes, each in a network namespace of its own with a shaped link (needs root and iproute2),
with real engines on virtual devices. A model that only the server's machine has in memory is loaded everywhere at once;
then a stream is served by one of the nodes, which is killed (kill -9 of all its processes), and another one by a node
that is told to leave. Prints one JSON line; seconds. Results in docs/results/e2e.md.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e.fleet import Fleet, Host
from tests.e2e.server import DEMOS, REPO, catalog
from tests.net.netns import Hosts, why_not

MODEL = DEMOS[0]
TOKENS = 400
AT_PIECE = 40
KNOWN_S = 4.0
"""Agents look through their stores every two seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=200.0)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"network namespaces are needed: {reason}")
    models = REPO / "demo-models"
    names = [f"n{i + 1}" for i in range(options.nodes)]
    with Hosts(1 + options.nodes, options.mbit) as hosts, tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        there = [Host(tuple(hosts.command(i, [])), hosts.ip(i)) for i in range(1 + options.nodes)]
        fleet = Fleet(Path(folder), there)
        try:
            fleet.begin_serving(catalog(models, count=1))
            for i, name in enumerate(names):
                fleet.begin_joining(name, i + 1)
            fleet.ready("local", *names)
            result = {"nodes": options.nodes, "mbit": options.mbit, **loading(fleet, options.mbit, 1 + options.nodes)}
            fleet.prism("unload", MODEL)
            result["killed"] = interrupted(fleet, names[0], fleet.kill)
            fleet.prism("unload", MODEL)
            if options.nodes > 1:
                result["left"] = interrupted(fleet, names[1], fleet.leave)
            print(json.dumps(result))
            fleet.stop()
        finally:
            for name in list(fleet.processes):
                fleet.kill(name)


def loading(fleet: Fleet, mbit: float, instances: int) -> dict[str, Any]:
    """The whole command; and the weights alone, as the machines report them."""
    fleet.prism("load", MODEL, "--device", "local/host:0")
    time.sleep(KNOWN_S)
    began_s = time.monotonic()
    told = fleet.prism("load", MODEL, "--to", str(instances))
    took_s = time.monotonic() - began_s
    nbytes = next((fleet.folder / "local" / "store").rglob("sglang*.pack")).stat().st_size
    arrivals = re.findall(r" in ([\d.]+)(ms|s) from", told.stderr)
    return {
        "load_s": round(took_s, 3),
        "weights_s": [float(value) / (1000 if unit == "ms" else 1) for value, unit in arrivals],
        "one_link_s": round(nbytes / (mbit * 1e6 / 8), 3),
        "bytes": nbytes,
    }


def interrupted(fleet: Fleet, name: str, how: Callable[[str], None]) -> dict[str, float]:
    """A stream whose machine goes away in the middle: the longest pause before and after."""
    fleet.prism("load", MODEL, "--device", f"{name}/host:0")
    times: list[float] = []
    going = threading.Thread(target=how, args=(name,))

    def at(pieces: int) -> None:
        times.append(time.monotonic())
        if pieces == AT_PIECE:
            going.start()

    fleet.ask(MODEL, "go on", TOKENS, at)
    going.join()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {
        "longest_gap_s": round(max(gaps[AT_PIECE - 1 :]), 3),
        "longest_before_s": round(max(gaps[: AT_PIECE - 1]), 3),
    }


if __name__ == "__main__":
    main()
