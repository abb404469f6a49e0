"""A device has engines for so many models: idle ones make room for the next although there is memory for all."""

from __future__ import annotations

from prism.core.effects import Activate, Deactivate
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, QUIET, A, B, C, on, reasons, serve


def seated(*names: str, devices: int = 1, settings: ClusterSettings = QUIET, **more: object) -> World:
    """Small models on devices with two seats each."""
    w = World(settings, [model_spec(name, 10, **more) for name in names])
    w.join(*node_devices("n", devices, max_engines=2))
    return w


def test_the_longest_idle_model_gives_its_seat_up() -> None:
    w = seated("a", "b", "c")
    serve(w, A)
    w.pass_time(60.0)
    serve(w, B)
    w.pass_time(60.0)
    serve(w, A)
    w.pass_time(60.0)
    w.arrive(C)
    assert reasons(w, Deactivate) == [("b", ReasonCode.MAKE_ROOM)]
    for _ in range(3):  # b leaves, c is loaded, c answers
        w.pass_time(0.5)
        w.step()
    assert on(w, C) == (GB0,)
    w.check()


def test_a_free_seat_elsewhere_comes_first() -> None:
    w = seated("a", "b", "c", devices=2)
    for model in (A, B, C):
        serve(w, model)
    assert not reasons(w, Deactivate)
    w.check()


def test_a_starving_model_gets_the_seat_of_one_in_use() -> None:
    w = seated("a", "b", "c", max_wait_s=4.0)
    for model in (A, B):
        serve(w, model)
        w.arrive(model)  # stays in use
    w.pass_time(3.0)
    w.arrive(C)
    for _ in range(20):
        w.pass_time(0.5)
        w.step()
    assert ModelName("c") in [m for m, _ in reasons(w, Activate)], "it waited for ever"
    w.check()


def test_pinned_models_keep_their_seats() -> None:
    w = seated("a", "b", "c", devices=2, pinned=True)
    for model in (A, B):
        serve(w, model)
    serve(w, C)
    assert {on(w, m)[0] for m in (A, B, C)} == {GB0, GB1}
    assert not reasons(w, Deactivate)
    w.check()
