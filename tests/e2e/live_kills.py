"""Kills while one instance leads its requests over another whose layers it lacks, under load.

    python -m tests.e2e.live_kills [--newcomers 2] [--tp 2] [--overlap] [--rounds 200] [--minutes 60] [--seed N]

Every round pairs new instances with the one that serves, kills one of them, the agent or the controller, or tells one
to leave (a scale-down, or an eviction, in the middle of a scale-up), lets the weights arrive, and waits until every
client has got further answers; each answer must be the reference's. Afterwards the server must hold no request, byte or
process too many.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from prism.config.state import StateDir
from prism.core.ids import local_name
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImages

from .server import REPO, Server, catalog, complete, greedy, prompts, start, until
from .wellbeing import all_is_well_again

MODEL, TOKENS, CLIENTS = "demo-llama", 24, 6
VICTIMS = ("peer", "leader", "agent", "controller", "peer leaves", "leader leaves")


def pair_catalog(models: Path, devices: int = 2, tp: int = 1, overlap: bool = False) -> dict[str, Any]:
    """Engines of few requests at a time, so that others wait for them; each on ``tp`` devices. ``overlap``: they
    prepare steps while those before are computed."""
    engine_args = {"dtype": "float32", "max_running_requests": 2}
    config = catalog(models, memory="64MiB", count=devices, engine_args=engine_args)
    for model in config["models"] if tp > 1 else ():
        model["tp"] = tp
    return config | {"live_scaling": {"mode": "pair"}, "engines": {"overlap": overlap}}


class Load:
    """Clients that ask all the time; every answer must be the reference's."""

    def __init__(self, server: Server, models: Path, clients: int = CLIENTS, model: str = MODEL) -> None:
        self._server, self._path, self._model = server, str(models / model), model
        self._over = threading.Event()
        self._asked = prompts(8)
        for prompt in self._asked:
            greedy(self._path, prompt, TOKENS)
        self._answers = [0] * clients
        self._asking: list[Future[None]] = []

    def _ask(self, client: int) -> None:
        while not self._over.is_set():
            prompt = self._asked[(client + len(self._answers) * self._answers[client]) % len(self._asked)]
            answer = complete(self._server.client, self._model, prompt, TOKENS)
            assert answer == greedy(self._path, prompt, TOKENS)
            self._answers[client] += 1

    def wait_for_all(self) -> None:
        """Every client gets two answers more: what it had under way, and one that was asked since."""
        before = list(self._answers)

        def more() -> bool:
            for failed in [each for each in self._asking if each.done()]:
                failed.result()
            return all(now >= then + 2 for now, then in zip(self._answers, before, strict=True))

        until(more, "answers for every client")

    @contextmanager
    def running(self) -> Iterator[Load]:
        clients = len(self._answers)
        with ThreadPoolExecutor(clients) as pool:
            self._asking = [pool.submit(self._ask, client) for client in range(clients)]
            try:
                yield self
            finally:
                self._over.set()
            for each in self._asking:
                each.result()


def replicas(server: Server, model: str = MODEL) -> list[dict[str, Any]]:
    """Those that serve, the oldest first."""
    return sorted(server.replicas(model), key=lambda r: int(r["generation"]))


def remote_of(server: Server) -> dict[str, Any]:
    """What operators see of the layers of the youngest of several instances."""
    found = replicas(server)
    return (found[-1].get("remote") or {}) if len(found) > 1 else {}


def leading(server: Server, model: str = MODEL) -> int:
    """Instances whose layers run elsewhere."""
    return sum(bool((r.get("remote") or {}).get("peers")) for r in replicas(server, model))


def workers_on(server: Server, device: str) -> list[int]:
    """Engine processes of a device, parked ones too."""
    return [pid for pid in server.pids("prism: engine") if _words(pid)[-1:] == [local_name(device)]]  # type: ignore[arg-type]


def _words(pid: int) -> list[str]:
    return " ".join(psutil.Process(pid).cmdline()).split()


def kill(server: Server, victim: str, chance: random.Random) -> None:
    first, *others = (replica["devices"] for replica in replicas(server))
    match victim:
        case "peer" | "leader":
            pids = workers_on(server, chance.choice(first if victim == "peer" else chance.choice(others)))
            assert pids
            for pid in pids:
                server.kill(pid)
        case "peer leaves" | "leader leaves":
            devices = first if victim == "peer leaves" else chance.choice(others)
            server.admin(f"models/{MODEL}/unload", {"devices": devices, "carry": chance.random() < 0.5})
        case _:
            server.kill(server.named(victim))


def one_round(
    server: Server, models: Path, victim: str, chance: random.Random, newcomers: int = 1, tp: int = 1
) -> None:
    """See the module. The server has a device for each."""
    complete(server.client, MODEL, "an image is left", 4)
    until(lambda: len(replicas(server)) == 1, "one instance")
    image = SlowImages(WeightStore(StateDir(server.state).store), MODEL, tp)
    image.arrive(0, 1, image.layers + 1)
    with closing(image), Load(server, models).running() as load, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(load_instances, server, 1 + newcomers)
        until(lambda: leading(server) == newcomers, "layers that run elsewhere")
        asked.result()
        time.sleep(chance.uniform(0.0, 0.3))
        kill(server, victim, chance)
        time.sleep(chance.uniform(0.0, 0.3))
        order = list(range(2, image.layers + 1))
        chance.shuffle(order)
        for piece in order:
            image.arrive(piece)
        load.wait_for_all()
    all_is_well_again(server, models, 1 if tp == 1 else 2)


def load_instances(server: Server, instances: int, model: str = MODEL) -> None:
    try:
        server.admin(f"models/{model}/load", {"instances": instances})
    except httpx.HTTPStatusError as refused:  # the scheduler's own scale-out may have come first
        assert refused.response.status_code < 500, refused.response.text


def _state(server: Server) -> str:
    """What is there when a round found a fault."""
    lines = []
    for process in server.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline()).strip()
            lines.append(f"{process.pid} of {process.ppid()}, {process.status()}: {words[:100] or process.name()}")
    with contextlib.suppress(httpx.HTTPError):
        lines += [str(server.admin(what)) for what in ("status", "devices", "requests")] + [str(replicas(server))]
    return "\n".join([*lines, server.output.read_text()[-60_000:]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes while engines run layers for each other.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--newcomers", type=int, default=1, help="instances that load at once")
    parser.add_argument("--tp", type=int, default=1, help="devices of an instance")
    parser.add_argument("--overlap", action="store_true", help="engines prepare steps ahead")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    chance, models = random.Random(options.seed), REPO / "demo-models"
    killed: Counter[str] = Counter()
    over_s = time.monotonic() + 60.0 * options.minutes
    with tempfile.TemporaryDirectory(prefix="prism-live-") as folder:
        devices = options.tp * (1 + options.newcomers)
        server = start(Path(folder), pair_catalog(models, devices, options.tp, options.overlap))
        try:
            while sum(killed.values()) < options.rounds and time.monotonic() < over_s:
                victim = chance.choice(VICTIMS)
                print(f"round {sum(killed.values())}: {victim}", flush=True)
                try:
                    one_round(server, models, victim, chance, options.newcomers, options.tp)
                except BaseException:
                    print(_state(server), flush=True)
                    raise
                killed[victim] += 1
        finally:
            server.stop()
    print(f"no fault in {sum(killed.values())} rounds: {', '.join(f'{n} {who}' for who, n in sorted(killed.items()))}")


if __name__ == "__main__":
    main()
