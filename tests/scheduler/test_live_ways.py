"""How further instances begin (``live_scaling``): chosen, forced, and what ``prism plan`` says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prism.core.effects import Activate, decision_record
from prism.core.events import (
    ActivationError,
    ActivationFinished,
    Arrivals,
    CatalogChanged,
    DeviceReport,
    InstanceLoad,
    OperatorLoad,
)
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, LiveMode
from prism.core.specs import LoraRoom, ModelKind, Speculation, SpeculativeAlgorithm
from prism.scheduler.planning import plan
from tests.scheduler.cluster_world import SHAPE, World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import A, serve


def served_world(live: LiveMode, nodes: int = 1, layers: int = 32, own: LiveMode | None = None, **more: Any) -> World:
    """A model of 32 layers that serves on the first of two devices of ``n``, or of one each of ``n`` and ``x``."""
    settings = ClusterSettings(rebalance_every_s=0.0, min_kv_tokens=0, live=live, activation_guess_s=4.0, **more)
    w = World(settings, [replace(model_spec("a", 300), shape=replace(SHAPE, layers=layers), live=own)])
    w.join(*node_devices("n", 2 if nodes == 1 else 1))
    serve(w, A)
    w.scheduler.books.models[A].activation_s = 4.0
    if nodes > 1:
        w.join(*node_devices("x", 1))
    return w


def flood(w: World, arrivals: int = 30, waiting: int = 12) -> Activate | None:
    """What is ordered when requests wait too long, while ``arrivals`` come within a second."""
    before = len(w.log)
    w.pass_time(0.5)
    w.send(Arrivals(A, arrivals))
    (key,) = [k for k, i in w.live.items() if i.state == "ready"]
    load = InstanceLoad(key, 300, 100, 0, 20, waiting, 9, waited_s=1.0)
    w.send(DeviceReport(w.live[key].devices[0], 1000, 500, (load,)))
    return next((e for _, e in w.log[before:] if isinstance(e, Activate)), None)


def test_several_at_once_from_several_machines_form_pipelines_where_that_serves_more() -> None:
    """Two machines serve; an operator wants eight more beside a flood."""
    w = served_world(LiveMode.AUTO, nodes=2, max_replicas=10)
    books = w.scheduler.books
    w.send(OperatorLoad(A, (), 2))
    (second,) = [k for k, i in w.live.items() if i.state != "ready"]
    w.activated(second)
    for node in "pqrstuvw":
        w.join(*node_devices(node, 1))
    w.send(Arrivals(A, 120))
    for key, live in w.live.items():
        w.send(DeviceReport(live.devices[0], 1000, 500, (InstanceLoad(key, 300, 6, 0, 2, 60, 9),)))
    before = len(w.log)
    w.send(OperatorLoad(A, (), 10))
    orders = [e for _, e in w.log[before:] if isinstance(e, Activate)]
    assert len(orders) == 8 and {order.live for order in orders} == {LiveMode.PIPELINES}
    assert numbers(orders[0])["met_pipelines"] > numbers(orders[0])["met_zigzag"]  # type: ignore[operator]
    w.activated(orders[0].key)
    assert books.models[A].early_s is None


def test_hops_over_the_network_make_pairs_worth_less() -> None:
    near, far = (numbers(flood(served_world(LiveMode.AUTO, nodes=n)) or pytest.fail("nothing came")) for n in (1, 2))
    assert near["met_stop"] == far["met_stop"] and near["met_zigzag"] > far["met_zigzag"]  # type: ignore[operator]


def numbers(effect: Activate) -> dict[str, object]:
    return dict(effect.reason.numbers)


def test_a_burst_beside_an_instance_that_serves_is_paired_and_the_plan_says_why() -> None:
    w = served_world(LiveMode.AUTO)
    order = flood(w)
    assert order is not None and order.live is LiveMode.PAIR
    assert numbers(order)["way"] == "zigzag" and numbers(order)["met_zigzag"] > numbers(order)["met_stop"]  # type: ignore[operator]
    assert decision_record(order, 0.0)["live"] == "pair"
    shown = [d for d in plan(w.scheduler, w.now) if d.action == "activate"]
    assert [(d.target, d.reason) for d in shown] == [(order.devices, order.reason)]
    w.activated(order.key)
    assert not [d for d in plan(w.scheduler, w.now) if d.action == "activate"], "it is here"


def test_on_another_machine_it_is_paired_too() -> None:
    order = flood(served_world(LiveMode.AUTO, nodes=2))
    assert order is not None and order.live is LiveMode.PAIR


def test_a_model_of_one_layer_comes_whole() -> None:
    order = flood(served_world(LiveMode.AUTO, layers=1))
    assert order is not None and order.live is LiveMode.WHOLE
    assert numbers(order)["way"] == "stop" and "met_zigzag" not in numbers(order)
    assert "live" not in decision_record(order, 0.0)


WHOLE_ONLY = {
    "adapters": {"lora": LoraRoom(1, 8, ("qkv_proj",))},
    "speculative decoding": {"speculation": Speculation(SpeculativeAlgorithm.NGRAM, 4)},
    "it answers with vectors": {"kind": ModelKind.EMBED},
}


@pytest.mark.parametrize("why", WHOLE_ONLY)
def test_what_cannot_serve_early_comes_whole_and_the_decision_says_why(why: str) -> None:
    w = served_world(LiveMode.AUTO)
    record = w.scheduler.books.models[A]
    record.spec = replace(record.spec, **WHOLE_ONLY[why])  # type: ignore[arg-type]
    order = flood(w)
    assert order is not None and order.live is LiveMode.WHOLE
    assert (numbers(order)["way"], numbers(order)["whole_only"]) == ("stop", why)


def test_what_an_engine_found_is_remembered_until_the_model_changes() -> None:
    w = served_world(LiveMode.AUTO, max_replicas=10)
    first = flood(w)
    w.join(*node_devices("p", 1))
    assert first is not None and first.live is LiveMode.PAIR
    w.live[first.key].state = "ready"
    w.send(ActivationFinished(first.key, 4.0, whole_only="SGLang runs it as a whole only"))
    before = len(w.log)
    w.send(OperatorLoad(A, (), 3))
    (second,) = [e for _, e in w.log[before:] if isinstance(e, Activate)]
    assert second.live is LiveMode.WHOLE and numbers(second)["whole_only"] == "SGLang runs it as a whole only"
    record = w.scheduler.books.models[A]
    w.send(CatalogChanged((replace(record.spec, slo_ttft_s=9.0),), ()))
    assert not w.scheduler.books.whole_only(record)


def test_after_an_engine_that_died_the_next_one_comes_whole() -> None:
    """Whatever killed it, requests are served meanwhile; whoever serves clears the record."""
    w = served_world(LiveMode.AUTO)
    first = flood(w)
    assert first is not None and first.live is LiveMode.PAIR
    w.failed(first.key, ActivationError.ENGINE_DIED)
    w.pass_time(60.0)
    second = flood(w)
    assert second is not None and second.live is LiveMode.WHOLE
    assert numbers(second)["whole_only"] == "its last engine failed"
    w.activated(second.key)
    assert not w.scheduler.books.whole_only(w.scheduler.books.models[A])


def test_as_many_are_paired_as_there_are_others_to_pair_with() -> None:
    """What the choice counted; all that come leaning on one instance would make its steps longer for everybody."""
    settings = ClusterSettings(rebalance_every_s=0.0, min_kv_tokens=0, live=LiveMode.AUTO, activation_guess_s=4.0)
    w = World(settings, [replace(model_spec("a", 300), shape=replace(SHAPE, layers=32))])
    w.join(*node_devices("n", 4))
    serve(w, A)
    w.scheduler.books.models[A].activation_s = 4.0
    before = len(w.log)
    assert flood(w) is not None
    orders = [e.live for _, e in w.log[before:] if isinstance(e, Activate)]
    assert orders == [LiveMode.PAIR, LiveMode.WHOLE, LiveMode.WHOLE]


def test_who_runs_layers_for_one_already_gets_no_second_leader_while_that_does() -> None:
    """A burst orders several times within the time of a load; all that leaned on the one that serves made it slow."""
    w = served_world(LiveMode.AUTO, max_replicas=10)
    first = flood(w)
    assert first is not None and first.live is LiveMode.PAIR
    w.join(*node_devices("p", 1))
    second = flood(w, arrivals=90, waiting=30)
    assert second is not None and second.live is LiveMode.WHOLE and "met_zigzag" not in numbers(second)
    w.failed(first.key, ActivationError.STALE)
    w.join(*node_devices("q", 1))
    third = flood(w, arrivals=90, waiting=30)
    assert third is not None and third.live is LiveMode.PAIR, "nobody leans on it any more"


@pytest.mark.parametrize("live", [LiveMode.WHOLE, LiveMode.PAIR, LiveMode.PIPELINES])
def test_a_forced_way_is_taken_whatever_would_serve_more(live: LiveMode) -> None:
    order = flood(served_world(live))
    assert order is not None and order.live is live and "way" not in numbers(order)


@pytest.mark.parametrize(("layers", "live"), [(32, LiveMode.PIPELINES), (1, LiveMode.WHOLE)])
def test_several_instances_of_a_model_that_nobody_serves_form_pipelines(layers: int, live: LiveMode) -> None:
    settings = ClusterSettings(rebalance_every_s=0.0, min_kv_tokens=0, live=LiveMode.AUTO)
    w = World(settings, [replace(model_spec("a", 300), shape=replace(SHAPE, layers=layers))])
    w.join(*node_devices("n", 3))
    w.send(OperatorLoad(A, (), 3))
    assert [e.live for _, e in w.log if isinstance(e, Activate)] == 3 * [live]


def test_the_only_instance_of_a_model_comes_whole() -> None:
    w = served_world(LiveMode.AUTO)
    assert [e.live for _, e in w.log if isinstance(e, Activate)] == [LiveMode.WHOLE]


@pytest.mark.parametrize("own", [LiveMode.WHOLE, LiveMode.PAIR, LiveMode.PIPELINES])
def test_a_model_may_have_a_way_of_its_own(own: LiveMode) -> None:
    order = flood(served_world(LiveMode.AUTO, own=own))
    assert order is not None and order.live is own and "way" not in numbers(order)
    order = flood(served_world(LiveMode.WHOLE, own=LiveMode.AUTO))
    assert order is not None and order.live is LiveMode.PAIR and numbers(order)["way"] == "zigzag"


@pytest.mark.parametrize(("waiting", "live"), [(12, LiveMode.PAIR), (0, LiveMode.WHOLE)])
def test_an_operator_gets_what_was_asked_for_in_the_way_that_serves_most(waiting: int, live: LiveMode) -> None:
    w = served_world(LiveMode.AUTO)
    (key,) = w.live
    if waiting:
        w.send(Arrivals(A, 30))
        w.send(DeviceReport(w.live[key].devices[0], 1000, 500, (InstanceLoad(key, 300, 10, 0, 2, waiting, 9),)))
    before = len(w.log)
    w.send(OperatorLoad(ModelName("a"), (), 2))
    (order,) = [e for _, e in w.log[before:] if isinstance(e, Activate)]
    assert order.reason.code is ReasonCode.OPERATOR and order.live is live and "met_stop" in numbers(order)


def test_beginning_early_says_nothing_of_how_long_weights_take() -> None:
    w = served_world(LiveMode.PAIR)
    order = flood(w)
    assert order is not None
    w.live[order.key].state = "ready"
    w.send(ActivationFinished(order.key, 0.1, early=True))
    model = w.scheduler.books.models[A]
    assert (model.activation_s, model.early_s) == (4.0, 0.1)
