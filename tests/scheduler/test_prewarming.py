"""Models that are expected soon are loaded before they are asked, and at whose cost they are not."""

from __future__ import annotations

from dataclasses import replace

from prism.core.effects import Activate, Deactivate
from prism.core.events import OperatorUnload
from prism.core.ids import ModelName, NodeId
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.small_world import QUIET, A, B, C, reasons, serve, world

NEVER = replace(QUIET, prewarm=False)


def rest(w: World, seconds: float) -> None:
    """Nobody asks anything for so long; loads end and devices report all the while."""
    end_s = w.now + seconds
    while w.now < end_s - 1e-6:
        w.pass_time(min(0.5, end_s - w.now))
        w.step()


def minutes(w: World, count: int, *models: ModelName) -> None:
    """In each of so many minutes the models are asked once, one after the other at even distances."""
    for _ in range(count):
        for model in models:
            serve(w, model)
            rest(w, 60.0 / len(models) - 0.5)


def driven_out(w: World) -> None:
    """``a``, asked once a minute, has just answered and made room for ``b``, which an operator unloaded at once."""
    minutes(w, 6, A)
    serve(w, A)
    rest(w, 1.0)
    serve(w, B)
    rest(w, 1.5)
    w.send(OperatorUnload(B))
    w.step()


def ahead(w: World) -> list[str]:
    """Models loaded before they were asked, in order."""
    return [model for model, code in reasons(w, Activate) if code is ReasonCode.PREWARM]


def two_in_turn(settings: ClusterSettings) -> World:
    return world(model_spec("a", 600), model_spec("b", 600), settings=settings)


def test_models_that_come_in_turn_find_themselves_loaded() -> None:
    w = two_in_turn(QUIET)
    minutes(w, 4, A, B)
    rest(w, 0.1)
    before = len(w.log)
    minutes(w, 4, A, B)
    late = [e for _, e in w.log[before:] if isinstance(e, Activate) and e.reason.code is not ReasonCode.PREWARM]
    assert not late, "each had been loaded when its request came"
    assert sorted(ahead(w)[-4:]) == ["a", "a", "b", "b"]
    assert w.scheduler.policy.prewarmed.used >= 8 and w.scheduler.policy.prewarmed.saved_s > 0.0
    w.check()


def test_with_the_switch_off_everybody_waits() -> None:
    w = two_in_turn(NEVER)
    minutes(w, 8, A, B)
    assert not ahead(w) and len(reasons(w, Activate)) == 16


def test_into_free_memory_a_model_comes_back_before_its_time() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800))
    driven_out(w)
    assert ("a", ReasonCode.MAKE_ROOM) in reasons(w, Deactivate)
    rest(w, 59.0)
    assert ahead(w) == ["a"]
    assert len(w.routes[A]) == 1


def test_nobody_who_is_expected_as_soon_leaves_for_it() -> None:
    """Both are asked at the same moment of every minute, and only one has room: whoever it is stays."""
    w = two_in_turn(QUIET)
    for _ in range(10):
        serve(w, A)
        serve(w, B)
        rest(w, 59.0)
    assert not [c for _, c in reasons(w, Deactivate) if c is not ReasonCode.MAKE_ROOM]
    for _, effect in w.log:
        if isinstance(effect, Activate) and effect.reason.code is ReasonCode.PREWARM:
            raise AssertionError("one that is about to be asked was driven out for another")


def test_a_wrong_guess_is_the_first_to_leave_and_is_not_made_twice() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800), model_spec("c", 800))
    driven_out(w)
    rest(w, 57.0)
    assert ahead(w) == ["a"]
    serve(w, C)
    rest(w, 1.5)
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.MAKE_ROOM), (
        "it had no request yet and makes room all the same"
    )
    assert w.scheduler.policy.prewarmed.wasted == 1
    w.send(OperatorUnload(C))
    rest(w, 200.0)
    assert ahead(w) == ["a"]


def test_what_an_operator_has_unloaded_stays_away() -> None:
    w = world(model_spec("a", 300))
    minutes(w, 6, A)
    w.send(OperatorUnload(A))
    rest(w, 300.0)
    assert not ahead(w)


def test_what_an_operator_unloads_when_it_has_made_room_stays_away_too() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800))
    driven_out(w)
    w.send(OperatorUnload(A))
    rest(w, 300.0)
    assert not ahead(w)


def test_what_left_by_its_keep_alive_stays_away() -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0))
    minutes(w, 6, A)
    assert set(reasons(w, Deactivate)) == {("a", ReasonCode.KEEP_ALIVE)}
    assert not ahead(w)


def test_a_fleet_without_machines_waits_for_one() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800))
    driven_out(w)
    w.lose(NodeId("n"))
    w.pass_time(80.0)
    assert not ahead(w)
    w.check()


def test_models_used_together_come_together() -> None:
    """One program asks ``a`` and a moment later ``b``, at no regular times; ``c`` has the memory in between."""
    w = world(model_spec("a", 400), model_spec("b", 400), model_spec("c", 900))
    came: list[bool] = []
    for pause_s in (200.0, 470.0, 130.0, 890.0, 310.0, 650.0):
        asked_s = w.now
        serve(w, A)
        rest(w, 2.0)
        starts = [(t, e) for t, e in w.log if isinstance(e, Activate) and t >= asked_s and e.model == B]
        came.append([e.reason.code for _, e in starts] == [ReasonCode.PREWARM])
        serve(w, B)
        rest(w, 30.0)
        serve(w, C)
        rest(w, pause_s)
    assert came == [False, False, False, True, True, True], "the first time it was new, the next two say little"
    w.check()
