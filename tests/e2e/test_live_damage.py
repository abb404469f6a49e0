"""Weights that are corrupt on a machine, in memory and on disk: they come from another one, and answers stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImage
from tests.patience import until

from .fleet import Fleet, Host
from .live_kills import pair_catalog
from .server import greedy, prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LIVE, WHOLE, TOKENS = "demo-llama", "demo-qwen3", 24


@pytest.fixture(scope="module")
def two(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The server and another machine, "b", a device each; further instances of one model lead over the first, those of
    another one come with everything."""
    config = pair_catalog(demo_models, devices=1)
    config["models"] = [model for model in config["models"] if model["name"] in (LIVE, WHOLE)]
    config["models"][1]["live_scaling"] = "whole"
    fleet = Fleet(tmp_path_factory.mktemp("two"), [Host()])
    try:
        fleet.begin_serving(config)
        fleet.begin_joining("b", 0, memory="64MiB")
        fleet.ready("local", "b")
        yield fleet
        fleet.stop()
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


def on_b(fleet: Fleet, model: str) -> dict[str, object]:
    """What operators see of its instance there."""
    shown = fleet.shown(model)["replicas"]
    found = [r for r in shown if r["devices"] == ["b/host:0"]]
    return found[0] if found else {}


def layers_of(fleet: Fleet) -> tuple[object, object]:
    """Its state, and how many layers it has while others run the rest."""
    shown = on_b(fleet, LIVE)
    remote = shown.get("remote") or {}
    assert isinstance(remote, dict)
    return shown.get("state"), remote.get("held_layers") if remote.get("peers") else None


def leave_an_image_on_b(fleet: Fleet, model: str) -> None:
    """And have one instance, on the server."""
    for machine in ("b", "local"):
        fleet.prism("load", model, "--device", f"{machine}/host:0")
    until(lambda: not on_b(fleet, model), "its having left b")
    until(lambda: {"local", "b"} <= set(held(fleet, model)), "an image on every machine")


def held(fleet: Fleet, model: str) -> list[str]:
    return list(fleet.shown(model)["held"])


def said_corrupt(fleet: Fleet) -> int:
    """How often engines on b have said that a block was corrupt."""
    return sum(log.read_text().count("was corrupt") for log in (fleet.folder / "b" / "logs").glob("engine-*.jsonl"))


def damaged(store: WeightStore) -> bool:
    return any(store.verify(info.key) for info in store.ls() if info.tier.value == "disk")


def test_an_engine_that_leads_goes_on_over_its_peer_until_a_corrupt_block_has_come_from_elsewhere(
    two: Fleet, demo_models: Path
) -> None:
    path, store = str(demo_models / LIVE), WeightStore(StateDir(two.folder / "b").store)
    asked = prompts(8)
    reference = [greedy(path, prompt, TOKENS) for prompt in asked]
    leave_an_image_on_b(two, LIVE)
    image = SlowImage(store, LIVE)
    with ThreadPoolExecutor(1 + len(asked)) as pool:
        image.arrive(0, 1, image.layers + 1)
        loaded = pool.submit(two.prism, "load", LIVE, "--to", "2")

        def ask_all() -> list[Future[str]]:
            return [pool.submit(two.ask, LIVE, prompt, TOKENS) for prompt in asked]

        with closing(image):
            until(lambda: layers_of(two) == ("ready", 1), "b leading over the server's")
            image.arrive(*range(2, image.layers))
            image.spoil(image.layers)
            until(lambda: layers_of(two) == ("ready", image.layers - 1), "b having all but what is corrupt")
            assert [answer.result() for answer in ask_all()] == reference
            under_way = ask_all()
        assert [answer.result() for answer in under_way] == reference
        until(lambda: layers_of(two) == ("ready", None), "b needing nobody")
        assert [answer.result() for answer in ask_all()] == reference
        assert loaded.result().returncode == 0
    until(lambda: not damaged(store), "the block on disk")


def test_an_engine_that_comes_with_everything_waits_for_a_corrupt_block_from_elsewhere(
    two: Fleet, demo_models: Path
) -> None:
    store = WeightStore(StateDir(two.folder / "b").store)
    leave_an_image_on_b(two, WHOLE)
    image = SlowImage(store, WHOLE)
    image.arrive(*range(image.layers), image.layers + 1)
    image.spoil(image.layers)
    before = said_corrupt(two)
    with ThreadPoolExecutor(1) as pool:
        with closing(image):  # nobody mends it before
            loaded = pool.submit(two.prism, "load", WHOLE, "--device", "b/host:0")
            until(lambda: said_corrupt(two) > before, "an engine that has found it")
        loaded.result()
    assert on_b(two, WHOLE)["state"] == "ready"
    asked = prompts(8)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(two.ask, WHOLE, prompt, TOKENS) for prompt in asked]
        assert [a.result() for a in answers] == [greedy(str(demo_models / WHOLE), p, TOKENS) for p in asked]
    until(lambda: not damaged(store), "the block on disk")
