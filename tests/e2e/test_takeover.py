"""The controller dies while a model is loading: the next one knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from .test_live_pipelines import kill

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MODEL, TOKENS = "demo-llama", 12


@pytest.fixture
def two(demo_models: Path, tmp_path: Path) -> Iterator[Fleet]:
    """The server without a device that the model could use, and another machine, "b"."""
    config = pair_catalog(demo_models, devices=1)
    config["models"] = [model for model in config["models"] if model["name"] == MODEL]
    config["models"][0]["live_scaling"] = "whole"
    fleet = Fleet(tmp_path, [Host()])
    try:
        fleet.begin_serving(config)
        fleet.begin_joining("b", 0, memory="64MiB")
        fleet.ready("local", "b")
        fleet.prism("drain", "local/host:0")
        yield fleet
        fleet.stop()
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


def replicas(fleet: Fleet) -> list[tuple[str, int]]:
    """State and generation of each instance that operators see."""
    shown = fleet.shown(MODEL)["replicas"]
    return [(replica["state"], replica["generation"]) for replica in shown]


def test_a_model_that_is_loading_when_the_controller_dies_is_loaded_once(two: Fleet, demo_models: Path) -> None:
    two.prism("load", MODEL, "--device", "b/host:0")
    two.prism("unload", MODEL)
    until(lambda: not replicas(two), "its having left")
    image = SlowImage(WeightStore(StateDir(two.folder / "b").store), MODEL)
    with closing(image), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(two.prism, "load", MODEL, "--device", "b/host:0", ok=False)
        [(state, generation)] = until(lambda: replicas(two), "its being on its way")
        assert state == "loading"
        kill(two, "controller")
        until(lambda: replicas(two) == [("loading", generation)], "the next controller's knowing of it")
        image.arrive(*range(image.layers + 2))
        until(lambda: replicas(two) == [("ready", generation)], "its serving")
        assert asked.result().returncode == 0, "whoever asked hears of it"
    assert two.ask(MODEL, prompts(1)[0], TOKENS) == greedy(str(demo_models / MODEL), prompts(1)[0], TOKENS)
    assert replicas(two) == [("ready", generation)]
