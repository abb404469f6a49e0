"""Does a burst get its first tokens before the weights are there? 1 -> N machines over shaped links, paced devices.

    python -m benchmarks.live.machines [--sources 1 2] [--ways whole pair pipelines auto] [--cold] [--rounds 3]
        [--slower 2]

lambda-Scale's experiment (7.3, Figures 12 and 16), live: a real ``prism-serve`` and ``prism-node`` for every machine,
each in a network namespace with a shaped link (needs root and iproute2). ``--sources`` machines have a model of 62 MB,
and serve it (with ``--cold`` they only have it in memory); ``--receivers`` lack it. It is ordered onto all of these,
and 50 requests come in the same moment. All ways have the same multicast; ``whole`` is load-then-serve over it.

Devices are **paced**: a layer takes what :data:`PACE_US` declares, so that many of them on two cores behave like
devices. **Times follow from these declarations, they are no measurements of hardware.** Links are slower than the
papers' in proportion, since all machines' cores are this one's two. ``--slower`` makes devices and links slower
together, by one factor: what is declared keeps its proportions, and what the two cores really compute, for up to nine
machines, counts for less beside it (as do Prism's own fixed waits, which stay as they are). All ways and rounds run in
turns in one run; receivers forget the model's weights in between, and their workers keep what they built of it
(``engines.kept_models``). Prints a line a round: seconds from the burst to first tokens, to the multicast's end, and to
the moments between; then medians, with what engines that lose no moment would reach (*least*,
:mod:`benchmarks.live.ideal`), and the paper's numbers beside them (*at most*: what
this gains there on load-then-serve that loses no moment either). ``--keep FOLDER`` keeps all logs, and what
clients saw.

Last result: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.demo_models import kept_models
from benchmarks.live.burst_client import BurstJob, BurstSeen
from benchmarks.live.ideal import PACE_US, PROMPT_TOKENS, STEP_TOKENS, Engines, begun_s, sending, serving, stopping
from benchmarks.live.many_layers import LAYERS, many_layers
from benchmarks.live.moments import Moments, moments
from prism.config.state import StateDir
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import WeightStore
from tests.e2e.fleet import Fleet, Host
from tests.e2e.server import REPO
from tests.net.netns import Hosts, why_not
from tests.patience import until

WAYS: Final = ("whole", "pair", "pipelines", "auto")
TTFT_S: Final = 5
ANSWER_TOKENS: Final = 8
KNOWN_S: Final = 3.0
"""Agents look through their stores every two seconds."""
MEMORY: Final = "256MiB"
SERVER_MBIT: Final = 1000.0
"""It sends no weights; requests, tokens and reports of all machines go over its link."""
PAPER: Final = (
    "paper (lambda-Scale, Llama-2 13B): all 50 begun in 1.1 s; NCCL takes 1.4, FaaSNet 2, ServerlessLLM 8 times as long"
)


@dataclass(frozen=True, slots=True)
class BurstCase:
    """One round of one way, which is its model's name, too."""

    way: str
    sources: int
    round: int

    def __str__(self) -> str:
        return f"{self.sources}, {self.way} {self.round}"


@dataclass(frozen=True, slots=True)
class FleetScene:
    """What all rounds have in common."""

    fleet: Fleet
    names: tuple[str, ...]
    """Of the machines: the server's, then those that send, then those that receive."""
    receivers: int
    requests: int
    cold: bool

    def devices(self, machines: Iterable[str]) -> list[str]:
        return [f"{name}/host:0" for name in machines]


def paced(slower: float) -> dict[str, str]:
    """What a device declares of its speed."""
    return {what: f"{us * slower:g}us" for what, us in PACE_US.items()}


def fleet_catalog(folder: Path, ways: Iterable[str], slower: float) -> dict[str, Any]:
    """One model under several names, each with a way of its own."""
    return {
        "devices": [{"id": "host:0", "memory": MEMORY, "pace": paced(slower)}],
        "defaults": {
            "slo": {"ttft": f"{TTFT_S * slower:g}s", "tpot": f"{2 * slower:g}s"},
            "engine_args": {"dtype": "float32", "chunked_prefill_size": STEP_TOKENS},
        },
        "models": [{"name": way, "path": str(folder), "live_scaling": way} for way in ways],
        "policy": {"max_replicas": 1, "min_residency": "500ms"},
        "engines": {"max_per_device": 1, "kept_models": len(WAYS)},
        "weights": {"parameter_pool": False},
        "kv": {"keep": False},
    }


@contextmanager
def running(
    mbit: float, machines: int, catalog: dict[str, Any], folder: Path
) -> Iterator[tuple[Fleet, tuple[str, ...]]]:
    with ExitStack() as stack:
        there = stack.enter_context(Hosts(machines, mbit, {0: SERVER_MBIT}))
        fleet = Fleet(folder, [Host(tuple(there.command(i, [])), there.ip(i)) for i in range(machines)])
        names = ("local", *(f"n{i}" for i in range(1, machines)))
        try:
            fleet.begin_serving(catalog)
            for host, name in enumerate(names[1:], 1):
                fleet.begin_joining(name, host, memory=MEMORY)
            fleet.ready(*names)
            yield fleet, names
            fleet.stop()
        finally:
            for name in list(fleet.processes):
                fleet.kill(name)


def have_weights(scene: FleetScene, case: BurstCase) -> None:
    """The case's sources have them in memory, and serve, unless it is cold; nobody else has or does anything."""
    fleet, sources = scene.fleet, scene.names[1 : 1 + case.sources]
    fleet.prism("drain", *scene.devices(name for name in scene.names if name not in sources))
    for source in [name for name in sources if not packs(fleet, name)]:
        fleet.prism("load", case.way, "--device", f"{source}/host:0")
    if scene.cold:
        fleet.prism("unload", case.way, ok=False)
        fleet.prism("drain", *scene.devices(sources))
    else:
        fleet.prism("load", case.way, *(["--to", str(case.sources)] if case.sources > 1 else []))
    for name in (name for name in scene.names if name not in sources):
        for store, key in packs(fleet, name):
            store.rm(key)
    time.sleep(KNOWN_S)
    fleet.prism("drain", "--off", *scene.devices(scene.names[-scene.receivers :]))


def packs(fleet: Fleet, machine: str) -> list[tuple[WeightStore, PackKey]]:
    """Of a machine's store."""
    store = WeightStore(StateDir(fleet.folder / machine).store)
    return [(store, key) for key in dict.fromkeys(info.key for info in store.ls())]


def play(scene: FleetScene, case: BurstCase) -> BurstSeen:
    fleet = scene.fleet
    job = BurstJob(
        url=fleet.url,
        admin_key=(fleet.folder / "local" / "admin.key").read_text().strip(),
        model=case.way,
        instances=scene.receivers + (0 if scene.cold else case.sources),
        requests=scene.requests,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        seed=str(case),
    )
    command = [*fleet.hosts[0].prefix, sys.executable, "-m", "benchmarks.live.burst_client"]
    done = subprocess.run(command, input=msgspec.json.encode(job), stdout=subprocess.PIPE, cwd=REPO, check=True)
    return msgspec.json.decode(done.stdout, type=BurstSeen)


def one_round(scene: FleetScene, case: BurstCase) -> Moments:
    have_weights(scene, case)
    seen = play(scene, case)
    (scene.fleet.folder / f"{case.sources}-{case.way}-{case.round}.json").write_bytes(msgspec.json.encode(seen))
    logs = [scene.fleet.folder / name / "logs" for name in scene.names]
    until(lambda: len(moments(seen, logs).arrived_s) >= scene.receivers, "the multicast's end")
    found = moments(seen, logs)
    scene.fleet.prism("unload", case.way)
    scene.fleet.prism("drain", "--off", *scene.devices(scene.names))
    return found


def cases(ways: Sequence[str], sources: Sequence[int], rounds: int) -> list[BurstCase]:
    """In turns; the first round is each time's first to go last in the next one."""
    return [
        BurstCase(way, k, number)
        for number, k in itertools.product(range(rounds), sources)
        for way in (ways if number % 2 == 0 else tuple(reversed(ways)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="A burst while a model comes to several machines, live.")
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cold", action="store_true", help="sources have the weights in memory and do not serve")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--slower", type=float, default=1.0, help="devices and links together")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a short path: sockets are in it")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"network namespaces are needed: {reason}")
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="machines-")))
        folder.mkdir(exist_ok=True)
        model = many_layers(kept_models(), folder / "model")
        wanted = cases(options.ways, options.sources, options.rounds)
        slower, mbit = options.slower, options.mbit / options.slower
        catalog = fleet_catalog(model, options.ways, slower)
        print(f"{LAYERS} layers, pace {json.dumps(paced(slower))}, {mbit:g} Mbit/s, {options.receivers} receivers")
        machines = 1 + max(options.sources) + options.receivers
        fleet, names = stack.enter_context(running(mbit, machines, catalog, folder))
        scene = FleetScene(fleet, names, options.receivers, options.requests, options.cold)
        for way in options.ways:  # what only a worker's first activation of a model pays: its objects are kept
            one_round(scene, BurstCase(way, max(options.sources), -1))
        print(Moments.head(), flush=True)
        found: dict[tuple[int, str], list[Moments]] = {}
        for case in wanted:
            found.setdefault((case.sources, case.way), []).append(one_round(scene, case))
            print(found[case.sources, case.way][-1].row(str(case)), flush=True)
    summary(found, options)


def least_p90_s(sources: int, end_s: float, options: argparse.Namespace, *, early: bool = True) -> float:
    """Of engines that lose no moment, beside a multicast that ends then. ``early``: not of load-then-serve."""
    engines: Engines = sending if options.cold else serving
    way = engines if early else partial(stopping, engines)
    slower = float(options.slower)
    capacity = partial(way, sources, receivers=int(options.receivers), end_s=end_s / slower)
    return slower * begun_s(capacity, 0.9, options.requests)


def summary(found: dict[tuple[int, str], list[Moments]], options: argparse.Namespace) -> None:
    print("\n| sources | way | first | median | p90 | least | last | multicast's end | begun by then ", end="")
    print("| whole's p90 / this | at most |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for (sources, way), rounds in found.items():
        first, middle, p90, last = (
            statistics.median(each) for each in zip(*(m.first_tokens for m in rounds), strict=True)
        )
        end_s = statistics.median(m.end_s for m in rounds)
        begun = statistics.median(m.begun for m in rounds)
        whole = statistics.median(m.first_tokens[2] for m in found.get((sources, "whole"), rounds))
        least = least_p90_s(sources, end_s, options)
        at_most = least_p90_s(sources, end_s, options, early=False) / least
        times = " | ".join(f"{s:.2f}" for s in (first, middle, p90, least, last, end_s))
        print(f"| {sources} | {way} | {times} | {begun:g} | {whole / p90:.2f} | {at_most:.2f} |")
    print(f"\n{PAPER}", flush=True)


if __name__ == "__main__":
    main()
