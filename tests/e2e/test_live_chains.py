"""Weights come over a chain that the controller planned, to engines that lead meanwhile: every answer is exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.net.netns import Hosts, why_not
from tests.patience import until

from .fleet import Fleet, on_hosts, serving
from .live_kills import pair_catalog
from .server import greedy, prompts
from .test_live_pipelines import FAST_MBIT, LAYERS, MACHINES, MODEL, SLOW_MBIT, deep_model, held, instances, set_rates

pytestmark = [pytest.mark.engine, pytest.mark.net]
TOKENS = 24
TOPOLOGY: dict[str, Any] = {
    "leaves": [{"nodes": ["local", "b"], "uplink": "1MB"}, {"nodes": ["c", "d"], "uplink": "1MB"}],
    "domains": [{"nodes": ["c", "d"], "link": "400MB"}],
}
GROUPS = [{"local"}, {"b"}, {"c", "d"}]
"""The other switch is entered once, and what one of its two machines gets the other one gets from there."""


def leads(shown: dict[str, Any]) -> bool:
    """Whether an instance, as operators see it, serves with some of the layers."""
    remote = shown.get("remote") or {}
    return shown.get("state") == "ready" and bool(remote.get("peers")) and 0 < remote["held_layers"] < LAYERS


def has_all(shown: dict[str, Any]) -> bool:
    """Whether it serves alone."""
    return shown.get("state") == "ready" and not (shown.get("remote") or {}).get("peers")


def sent(fleet: Fleet) -> dict[str, Any]:
    """The reason of the multicast that runs; empty: none does."""
    shown = fleet.look("plan")["decisions"]
    found: dict[str, Any] = next((line["reason"] for line in shown if line["action"] == "send"), {})
    return found


def last_two(fleet: Fleet) -> list[dict[str, Any]]:
    shown = instances(fleet)
    return [shown.get(machine, {}) for machine in ("c", "d")]


def senders(shown: dict[str, Any]) -> set[str]:
    """The machines from which weights on their way to an instance came so far."""
    return set((shown.get("arriving") or {}).get("sources", ()))


def served(fleet: Fleet) -> dict[str, int]:
    return {machine: shown["served"] for machine, shown in instances(fleet).items()}


def ask_all(fleet: Fleet, reference: dict[str, str]) -> None:
    """At the same time; all must be right."""
    with ThreadPoolExecutor(len(reference)) as pool:
        answers = {text: pool.submit(fleet.ask, MODEL, text, TOKENS) for text in reference}
        assert {text: answer.result() for text, answer in answers.items()} == reference


def test_engines_lead_while_their_weights_come_over_a_planned_chain(demo_models: Path, tmp_path: Path) -> None:
    """Three machines behind the only source, on links on which a chain takes longer than an engine's start. Each leads
    over the source meanwhile, then goes on alone, and whoever answers, it is Hugging Face's answer."""
    if reason := why_not():
        pytest.skip(reason)
    path = deep_model(demo_models, tmp_path / MODEL)
    reference = {text: greedy(str(path), text, TOKENS) for text in prompts(8)}
    config = pair_catalog(tmp_path, devices=1) | {"topology": TOPOLOGY}
    config["models"] = [model for model in config["models"] if model["name"] == MODEL]
    config["devices"][0]["memory"] = "256MiB"
    config["weights"] = {"parameter_pool": False}  # the source stays the only one that has the weights
    with Hosts(4, FAST_MBIT) as links, serving(tmp_path, on_hosts(links), config, MACHINES, "256MiB") as fleet:
        fleet.prism("load", MODEL, "--device", "local/host:0")
        until(lambda: "local" in held(fleet), "the controller knowing who has it")
        set_rates(links, SLOW_MBIT, *MACHINES)
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(fleet.prism, "load", MODEL, "--to", "4")
            reason = until(lambda: sent(fleet), "a multicast")
            assert reason["way"] == "chain"
            assert [{*group.split("+")} for group in reason["path"].split(" > ")] == GROUPS
            until(lambda: any(map(leads, last_two(fleet))), "one of the last two leading")
            until(lambda: "b" in set().union(*map(senders, last_two(fleet))), "weights that b passed on")
            ask_all(fleet, reference)
            loaded.result()
        set_rates(links, FAST_MBIT, *MACHINES)
        until(
            lambda: {m for m, shown in instances(fleet).items() if has_all(shown)} >= {*MACHINES},
            "nobody needing anybody",
        )
        fleet.prism("drain", "local/host:0")
        until(lambda: sorted(instances(fleet)) == [*MACHINES], "the source being empty")
        before = served(fleet)

        def each_answered() -> bool:
            ask_all(fleet, reference)
            now = served(fleet)
            return all(now[machine] > before[machine] for machine in MACHINES)

        until(each_answered, "answers of each machine that got the model")
