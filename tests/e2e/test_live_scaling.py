"""A further instance serves before its weights are there, over one of the same machine, and goes on alone: exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImage, SlowImages

from .live_kills import MODEL, Load, one_round, pair_catalog, remote_of, replicas
from .server import Server, complete, start, until

MANY = 12
"""Clients, so that some wait whenever anybody looks: two are answered at a time, others may just be asking again."""
pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def pairing(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tmp_path_factory.mktemp("pair"), pair_catalog(demo_models))
    yield server
    server.stop()


def shows(server: Server, **remote: object) -> bool:
    """Whether operators see this of the youngest instance's layers."""
    return remote.items() <= remote_of(server).items()


def test_it_serves_over_another_while_its_weights_arrive(pairing: Server, demo_models: Path) -> None:
    complete(pairing.client, MODEL, "an image is left", 4)
    (first,) = replicas(pairing)
    image = SlowImage(WeightStore(StateDir(pairing.state).store), MODEL)
    with closing(image), Load(pairing, demo_models, MANY).running():
        until(lambda: replicas(pairing)[0]["waiting"], "requests waiting for the only instance")
        image.arrive(0, 1, image.layers + 1)
        pairing.admin(f"models/{MODEL}/load", {"instances": 2})
        until(lambda: shows(pairing, held_layers=1, peers=first["devices"]), "layers that run elsewhere")
        until(lambda: replicas(pairing)[-1]["served"], "answers before its layers are there")
        until(lambda: _shared(pairing), "requests that waited for the first being shared out")
        for piece in range(image.layers, 1, -1):
            image.arrive(piece)
        until(lambda: shows(pairing, held_layers=image.layers, peers=[]), "all layers being there")
        served = replicas(pairing)[-1]["served"]
        until(lambda: replicas(pairing)[-1]["served"] > served, "answers of its own")
    until(lambda: pairing.queued() == 0, "nothing in any queue")
    pairing.admin(f"models/{MODEL}/unload", {})
    pairing.wait_unloaded(MODEL)


def test_instances_of_two_devices_run_layers_for_each_other(demo_models: Path, tmp_path: Path) -> None:
    server = start(tmp_path, pair_catalog(demo_models, devices=4, tp=2))
    try:
        complete(server.client, MODEL, "an image is left", 4)
        (first,) = replicas(server)
        image = SlowImages(WeightStore(StateDir(server.state).store), MODEL, ranks=2)
        with closing(image), Load(server, demo_models, MANY).running() as load:
            image.arrive(0, 1, image.layers + 1)
            server.admin(f"models/{MODEL}/load", {"instances": 2})
            until(lambda: shows(server, held_layers=1, peers=first["devices"][:1]), "layers that run elsewhere")
            until(lambda: replicas(server)[-1]["served"], "answers before its layers are there")
            for piece in range(image.layers, 1, -1):
                image.arrive(piece)
            until(lambda: shows(server, held_layers=image.layers, peers=[]), "all layers being there")
            load.wait_for_all()
    finally:
        server.stop()


def _shared(server: Server) -> bool:
    lines = (server.state / "logs" / "decisions.jsonl").read_text().splitlines()
    return any(json.loads(line)["do"] == "ShareWaiting" for line in lines)


def test_several_newcomers_lead_over_one_and_whoever_is_killed_every_answer_is_exact(
    demo_models: Path, tmp_path: Path
) -> None:
    server = start(tmp_path, pair_catalog(demo_models, devices=3))
    try:
        for victim in ("peer", "leader"):
            one_round(server, demo_models, victim, random.Random(victim), newcomers=2)
    finally:
        server.stop()


@pytest.mark.parametrize("victim", ["peer", "leader"])
def test_whoever_is_killed_in_a_pair_every_answer_is_exact(pairing: Server, demo_models: Path, victim: str) -> None:
    one_round(pairing, demo_models, victim, random.Random(victim))
