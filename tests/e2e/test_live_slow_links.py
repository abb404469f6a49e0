"""The link of an instance that leads becomes slow: every request ends, and with its exact tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.weights.store.weight_store import WeightStore
from tests.engine.slow_image import SlowImage
from tests.net.netns import Hosts, why_not
from tests.patience import until

from .fleet import Fleet, on_hosts, serving
from .live_kills import pair_catalog
from .server import greedy, prompts
from .test_live_chains import has_all, leads
from .test_live_pipelines import FAST_MBIT, MODEL, deep_model, held, instances, leave_an_image_on

pytestmark = [pytest.mark.engine, pytest.mark.net]
MBIT, SLOWER = 20.0, 20
"""The link of "b", and by what factor it becomes slower."""
TOKENS, CLIENTS = 32, 4


@dataclass
class Asking:
    """Clients that ask one after the other; every answer must be the reference's."""

    fleet: Fleet
    reference: dict[str, str]
    answers: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    over: threading.Event = field(default_factory=threading.Event)
    clients: list[Future[None]] = field(default_factory=list)

    def _ask(self, client: int) -> None:
        texts = [*self.reference]
        while not self.over.is_set():
            text = texts[(client + CLIENTS * self.answers[client]) % len(texts)]
            assert self.fleet.ask(MODEL, text, TOKENS) == self.reference[text]
            self.answers[client] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            self.clients = [pool.submit(self._ask, client) for client in range(CLIENTS)]
            try:
                yield
            finally:
                self.over.set()
            for client in self.clients:
                client.result()

    def each_is_answered(self) -> None:
        """What each has under way, and what it asks after that."""
        before = [*self.answers]

        def more() -> bool:
            for client in self.clients:
                assert not client.done() or client.result() is None
            return all(now >= then + 2 for now, then in zip(self.answers, before, strict=True))

        until(more, "two answers for every client")


def leads_some(fleet: Fleet) -> bool:
    """Whether b leads, and answers somebody. One look: the next takes a second, and all may be different then."""
    shown = instances(fleet).get("b", {})
    return leads(shown) and shown["running"] > 0


@pytest.mark.parametrize("weights", ["wait", "come over it"])
def test_whoever_leads_over_a_link_that_becomes_slow_answers_exactly(
    demo_models: Path, tmp_path: Path, weights: str
) -> None:
    """An instance with some of the layers answers requests over another machine's when its link falls to a twentieth,
    both ways, with the rest of its weights on it or not. Nobody waits for ever; it goes on alone when it has all."""
    if reason := why_not():
        pytest.skip(reason)
    path = deep_model(demo_models, tmp_path / MODEL)
    reference = {text: greedy(str(path), text, TOKENS) for text in prompts(8)}
    config = pair_catalog(tmp_path, devices=1)
    config["models"] = [model for model in config["models"] if model["name"] == MODEL]
    config["devices"][0]["memory"] = "256MiB"
    config["weights"] = {"parameter_pool": False}  # no machine has the weights before it is told to
    with Hosts(2, FAST_MBIT) as links, serving(tmp_path, on_hosts(links), config, ["b"], "256MiB") as fleet:
        if weights == "wait":
            led_while_weights_wait(fleet, links, reference)
        else:
            led_while_weights_come(fleet, links, reference)


def goes_on_alone(fleet: Fleet, links: Hosts) -> None:
    """b needs nobody, and answers. While clients ask: one that the scheduler has ordered leaves behind its burst."""
    until(lambda: has_all(instances(fleet).get("b", {})), "b needing nobody")
    links.set_rate(1, FAST_MBIT)
    served = instances(fleet).get("b", {}).get("served", 0)
    until(lambda: instances(fleet).get("b", {}).get("served", 0) > served, "an answer of its own")


def led_while_weights_wait(fleet: Fleet, links: Hosts, reference: dict[str, str]) -> None:
    leave_an_image_on(fleet, "local", "b")
    fleet.prism("load", MODEL, "--device", "local/host:0")
    image = SlowImage(WeightStore(StateDir(fleet.folder / "b").store), MODEL)
    asking = Asking(fleet, reference)
    with closing(image), ThreadPoolExecutor(1) as pool:
        image.arrive(0, 1, image.layers + 1)
        links.set_rate(1, MBIT)
        loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "2", ok=False)
        with asking.running():
            until(lambda: leads_some(fleet), "b leading with requests")
            links.set_rate(1, MBIT / SLOWER)
            asking.each_is_answered()
            image.arrive(*range(2, image.layers // 2))
            half = image.layers // 2 - 1
            until(lambda: (instances(fleet)["b"]["remote"] or {}).get("held_layers") == half, "its having half")
            asking.each_is_answered()
            image.arrive(*range(image.layers // 2, image.layers + 1))
            asking.each_is_answered()
            goes_on_alone(fleet, links)
        loaded.result()  # refused where the scheduler has ordered it for those who wait


def led_while_weights_come(fleet: Fleet, links: Hosts, reference: dict[str, str]) -> None:
    fleet.prism("load", MODEL, "--device", "local/host:0")
    until(lambda: "local" in held(fleet), "the controller knowing who has it")
    links.set_rate(1, MBIT)
    asking = Asking(fleet, reference)
    with ThreadPoolExecutor(1) as pool, asking.running():
        loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "2", ok=False)
        until(lambda: leads_some(fleet), "b leading with requests")
        links.set_rate(1, MBIT / SLOWER)
        asking.each_is_answered()
        links.set_rate(1, FAST_MBIT)
        asking.each_is_answered()
        goes_on_alone(fleet, links)
        loaded.result()  # refused where the scheduler has ordered it for those who wait
