"""What happens to instances that serve while their weights arrive: others leave, and others come. Exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImage

from . import test_live_pipelines as machines
from .live_kills import Load, leading, load_instances, one_round, pair_catalog, replicas
from .server import Server, complete, greedy, start, until
from .wellbeing import all_is_well_again

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MODEL, TOKENS = "demo-llama", 64
BURSTS = ("demo-llama", "demo-qwen3")


@pytest.fixture(scope="module")
def three(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three devices, and pairs."""
    server = start(tmp_path_factory.mktemp("three"), pair_catalog(demo_models, devices=3))
    yield server
    server.stop()


@pytest.mark.parametrize("carry_seed", [1, 2])
@pytest.mark.parametrize("who", ["peer leaves", "leader leaves"])
def test_whoever_is_told_to_leave_in_the_middle_of_a_scale_up_every_answer_is_exact(
    three: Server, demo_models: Path, who: str, carry_seed: int
) -> None:
    """The instance over which two others lead, or one of these: its requests end there, or go with their tokens."""
    one_round(three, demo_models, who, random.Random(carry_seed), newcomers=2)


def test_two_models_scale_out_at_the_same_time_over_the_same_devices(three: Server, demo_models: Path) -> None:
    """Each has an instance and gets two more, which lead over it; weights of both come in turns, in any order."""
    for model in BURSTS:
        complete(three.client, model, "an image is left", 4)
        until(lambda m=model: len(replicas(three, m)) == 1, f"one instance of {model}")  # type: ignore[misc]
    store = WeightStore(StateDir(three.state).store)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        images = {model: stack.enter_context(closing(SlowImage(store, model))) for model in BURSTS}
        for image in images.values():
            image.arrive(0, 1, image.layers + 1)
        loads = [stack.enter_context(Load(three, demo_models, 4, model).running()) for model in BURSTS]
        asked = [pool.submit(load_instances, three, 3, model) for model in BURSTS]
        for model in BURSTS:
            until(lambda m=model: leading(three, m) == 2, f"two of {model} leading over the first")  # type: ignore[misc]
        for each in asked:
            each.result()
        todo = [(model, piece) for model, image in images.items() for piece in range(2, image.layers + 1)]
        random.Random(1).shuffle(todo)
        for model, piece in todo:
            images[model].arrive(piece)
        for load in loads:
            load.wait_for_all()
        for model in BURSTS:
            until(lambda m=model: leading(three, m) == 0, f"all of {model} needing nobody")  # type: ignore[misc]
    all_is_well_again(three, demo_models)


def test_memory_that_another_model_wants_in_the_middle_of_a_scale_up_is_given_to_it(
    demo_models: Path, tmp_path: Path
) -> None:
    """Two devices with room for one model each: an instance leads over the other, whose weights do not come meanwhile,
    when another model is asked. It is served before they come, and all answers are exact."""
    mine, other = BURSTS
    config = pair_catalog(demo_models)
    for device in config["devices"]:
        device["memory"] = "36MiB"
    server = start(tmp_path, config)
    try:
        for model in (other, mine):
            complete(server.client, model, "an image is left", 4)
        server.admin(f"models/{other}/unload", {})
        until(lambda: len(replicas(server, mine)) == 1 and not replicas(server, other), "one instance")
        image = SlowImage(WeightStore(StateDir(server.state).store), mine)
        with closing(image), Load(server, demo_models, 4, mine).running() as load, ThreadPoolExecutor(1) as pool:
            image.arrive(0, 1, image.layers + 1)
            pool.submit(load_instances, server, 2, mine).result()
            until(lambda: leading(server, mine) == 1, "an instance that leads over the first")
            answer = complete(server.client, other, "who makes room", TOKENS)
            assert answer == greedy(str(demo_models / other), "who makes room", TOKENS)
            image.arrive(*range(2, image.layers + 1))
            load.wait_for_all()
        all_is_well_again(server, demo_models)
    finally:
        server.stop()


def test_a_member_of_a_pipeline_leaves_before_it_served_and_the_others_go_on(demo_models: Path, tmp_path: Path) -> None:
    """Three wait for each other's layers; one is told to leave, and does so although its weights never come."""
    reference = greedy(str(demo_models / MODEL), "hello there", TOKENS)
    with machines.running(None, demo_models, tmp_path) as fleet, ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        machines.leave_an_image_on(fleet, "local", *machines.MACHINES)
        fleet.prism("drain", "local/host:0")
        stores = {name: WeightStore(StateDir(fleet.folder / name).store) for name in machines.MACHINES}
        images = {name: stack.enter_context(closing(SlowImage(store, MODEL))) for name, store in stores.items()}
        for image in images.values():
            image.arrive(0, 1, image.layers + 1)
        loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "3", ok=False)
        for name in machines.MACHINES:
            until(lambda n=name: machines.sees(fleet, n, "loading", 1), f"{name} waiting for the others")  # type: ignore[misc]
        fleet.prism("unload", MODEL, "--device", "d/host:0")
        until(lambda: "d" not in machines.instances(fleet), "d having left")
        images["b"].arrive(2, 3)
        images["c"].arrive(4)
        for name, held, other in (("b", 3, "c"), ("c", 2, "b")):
            until(lambda n=name, h=held, o=other: machines.sees(fleet, n, "ready", h, o), f"{name} over {other}")  # type: ignore[misc]
        assert fleet.ask(MODEL, "hello there", TOKENS) == reference
        for name in ("b", "c"):
            images[name].arrive(2, 3, 4)
            until(lambda n=name: machines.complete(fleet, n), f"{name} needing nobody")  # type: ignore[misc]
        loaded.result()
        assert fleet.ask(MODEL, "hello there", TOKENS) == reference
