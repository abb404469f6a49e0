"""Instances on several machines that come together run layers for each other before any of them has all: exactly."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prism.config.state import StateDir
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImage
from tests.net.netns import Hosts, why_not
from tests.patience import until

from .fleet import Fleet, Host, serving
from .server import catalog, greedy

MODEL, TOKENS = "demo-llama", 64
LAYERS = 12
SLOW_MBIT, FAST_MBIT = 10.0, 1000.0
MACHINES = ("b", "c", "d")


def pipeline_catalog(models: Path, memory: str) -> dict[str, Any]:
    config = catalog(models, memory=memory, count=1, engine_args={"dtype": "float32"})
    only = [model for model in config["models"] if model["name"] == MODEL]
    return config | {"models": only, "live_scaling": {"mode": "pipelines"}}


@contextmanager
def running(links: Hosts | None, models: Path, folder: Path, memory: str = "32MiB") -> Iterator[Fleet]:
    """The server on host 0, and three machines with one device each: on hosts of ``links``, or all on loopback."""
    hosts = [Host()] * 4 if links is None else [Host(tuple(links.command(i, [])), links.ip(i)) for i in range(4)]
    with serving(folder, hosts, pipeline_catalog(models, memory), MACHINES, memory) as started:
        yield started


@contextmanager
def linked(mbit: float) -> Iterator[Hosts | None]:
    """Four hosts on links of this rate, but for the server's, over which all reports go; 0: none."""
    if not mbit:
        yield None
        return
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(4, mbit, {0: FAST_MBIT}) as links:
        yield links


def instances(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """What operators see, by machine, whatever the state."""
    shown = fleet.shown(MODEL)["replicas"]
    return {replica["devices"][0].partition("/")[0]: replica for replica in shown}


def sees(fleet: Fleet, machine: str, state: str, held_layers: int, *peers: str) -> bool:
    shown = instances(fleet).get(machine, {})
    remote = shown.get("remote") or {}
    found = (shown.get("state"), remote.get("held_layers"), sorted(remote.get("peers", ())))
    return found == (state, held_layers, sorted(f"{peer}/host:0" for peer in peers))


def leave_an_image_on(fleet: Fleet, *machines: str) -> None:
    for machine in machines:
        fleet.prism("load", MODEL, "--device", f"{machine}/host:0")
    until(lambda: held(fleet) >= set(machines), "an image on every machine")
    fleet.prism("unload", MODEL)
    until(lambda: not instances(fleet), "its having left")


def held(fleet: Fleet) -> set[str]:
    """Machines that have the weights."""
    return set(fleet.shown(MODEL)["held"])


def complete(fleet: Fleet, machine: str) -> bool:
    """Whether it serves with all layers."""
    shown = instances(fleet).get(machine, {})
    remote = shown.get("remote") or {"held_layers": 4}
    return shown.get("state") == "ready" and remote["held_layers"] == 4


def kill(fleet: Fleet, victim: str) -> None:
    if victim == "machine":
        fleet.kill("d")
        return
    machine, words = ("local", "prism.controller.main") if victim == "controller" else ("d", "prism: engine")
    found = [process for process in fleet.family(machine) if words in " ".join(process.cmdline())]
    assert found, f"no {words} on {machine}"
    for process in found:
        process.kill()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("mbit", "victim"),
    [
        pytest.param(0.0, "engine", marks=pytest.mark.slow),
        pytest.param(0.0, "controller", marks=pytest.mark.slow),
        pytest.param(FAST_MBIT, "machine", marks=pytest.mark.net),
    ],
)
def test_machines_serve_together_and_whoever_is_killed_every_answer_is_exact(
    demo_models: Path, tmp_path: Path, mbit: float, victim: str
) -> None:
    """Three machines, of which each gets other layers; one of their engines, all of the machine or the controller is
    killed in mid-answer, and they go on when their layers come; whoever is left has everything in the end."""
    with linked(mbit) as links, running(links, demo_models, tmp_path) as fleet:
        serve_together_and_kill(fleet, demo_models, victim)


def serve_together_and_kill(fleet: Fleet, demo_models: Path, victim: str) -> None:
    """See the test."""
    reference = {text: greedy(str(demo_models / MODEL), text, TOKENS) for text in ("hello there", "far away", "go on")}
    leave_an_image_on(fleet, "local", *MACHINES)
    fleet.prism("drain", "local/host:0")
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        stores = {name: WeightStore(StateDir(fleet.folder / name).store) for name in MACHINES}
        images = {name: stack.enter_context(closing(SlowImage(store, MODEL))) for name, store in stores.items()}
        for image in images.values():
            image.arrive(0, 1, image.layers + 1)
        loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "3")
        for name in MACHINES:
            until(lambda n=name: sees(fleet, n, "loading", 1), f"{name} having what it needs to lead")  # type: ignore[misc]
        images["b"].arrive(2)
        images["c"].arrive(3)
        images["d"].arrive(4)
        for name in MACHINES:
            others = [other for other in MACHINES if other != name]
            until(lambda n=name, o=others: sees(fleet, n, "ready", 2, *o), f"{name} leading over the others")  # type: ignore[misc]
        shown = "2/4 over c/host:0,d/host:0 for c/host:0,d/host:0"
        until(lambda: shown in fleet.prism("ps").stdout, "the pipeline in prism ps")
        answers = {text: pool.submit(fleet.ask, MODEL, text, TOKENS) for text in reference}
        assert {text: answer.result() for text, answer in answers.items()} == reference

        killed: list[int] = []

        def at(pieces: int) -> None:
            if pieces == 10 and not killed:
                killed.append(pieces)
                kill(fleet, victim)
                images["b"].arrive(4)

        answers = {text: pool.submit(fleet.ask, MODEL, text, TOKENS, at) for text in reference}
        assert {text: answer.result() for text, answer in answers.items()} == reference
        assert killed
        for name in MACHINES if victim == "controller" else ("b", "c"):
            images[name].arrive(*range(2, 5))
            until(lambda n=name: complete(fleet, n), f"{name} needing nobody")  # type: ignore[misc]
        assert loaded.result().returncode == 0
    assert fleet.ask(MODEL, "go on", TOKENS) == reference["go on"]


def deep_model(models: Path, folder: Path) -> Path:
    """The demo model with twelve layers, 75 MiB: an instance needs a sixth of it to lead."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig.from_pretrained(models / MODEL)
    shape = {"num_hidden_layers": LAYERS, "hidden_size": 384, "intermediate_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96}
    for key, value in {**shape, **heads}.items():
        setattr(config, key, value)
    shutil.copytree(models / MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def set_rates(links: Hosts, mbit: float, *machines: str) -> None:
    for machine in machines:
        links.set_rate(1 + MACHINES.index(machine), mbit)


def leads_over_another(fleet: Fleet, *machines: str) -> bool:
    """Whether one of these serves over another of them, with some of the layers."""
    shown = instances(fleet)
    serving = [shown[m].get("remote") or {} for m in machines if shown.get(m, {}).get("state") == "ready"]
    over = {peer.partition("/")[0] for remote in serving for peer in remote.get("peers", ())}
    return any(0 < remote.get("held_layers", 0) < LAYERS for remote in serving) and bool(over & {*machines})


def happens_to_b(fleet: Fleet, what: str) -> None:
    """To one of two sources, in the middle of what it sends."""
    if what == "is killed":
        fleet.kill("b")
    else:
        fleet.leave("b")


@pytest.mark.net
@pytest.mark.engine
@pytest.mark.parametrize("source", ["is killed", "leaves"])
def test_what_two_machines_send_in_shifted_order_is_led_over_before_it_is_there(
    demo_models: Path, tmp_path: Path, source: str
) -> None:
    """Sources that do not serve, and links that are too slow for the weights to be there before an engine is, however
    long it takes to begin: the two receivers are a pipeline before either of them has everything, and answer, whatever
    becomes of one source meanwhile. Then the links become fast, and both go on alone."""
    path = deep_model(demo_models, tmp_path / MODEL)
    asked = ("hello there", "far away", "go on")
    reference = {text: greedy(str(path), text, TOKENS) for text in asked}
    with linked(FAST_MBIT) as links, running(links, tmp_path, tmp_path, memory="256MiB") as fleet:
        assert links is not None
        leave_an_image_on(fleet, "local", "b")
        for machine in ("local", "b"):
            fleet.prism("drain", f"{machine}/host:0")
        set_rates(links, SLOW_MBIT, *MACHINES)
        with ThreadPoolExecutor(2 + len(asked)) as pool:
            loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "2")
            until(lambda: leads_over_another(fleet, "c", "d"), "one of two leading over the other")
            begun = threading.Event()

            def at(pieces: int) -> None:
                if pieces == 10:
                    begun.set()

            answers = {text: pool.submit(fleet.ask, MODEL, text, TOKENS, at) for text in asked}
            until(begun.is_set, "an answer under way")
            happened = pool.submit(happens_to_b, fleet, source)
            assert {text: answer.result() for text, answer in answers.items()} == reference
            happened.result()
            assert fleet.ask(MODEL, asked[0], TOKENS) == reference[asked[0]]
            set_rates(links, FAST_MBIT, "c", "d")
            told = loaded.result()
        assert "has all layers" in told.stderr
        assert fleet.ask(MODEL, "hello there", TOKENS) == reference["hello there"]
