"""When a migration pays: what it leaves behind must be worse than what it makes of its destination."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prism.core.effects import Activate, Deactivate
from prism.core.events import DeviceReport, InstanceLoad
from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, MigrationTest, Placement
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
HERE, THERE = DeviceId("n/host:0"), DeviceId("x/host:0")
KV_BYTES = 180
"""Of each model on the pressed device; its weights are 200 of 1000 bytes."""
USE = 2 * (200 + KV_BYTES) / 1000


def settings(**more: object) -> ClusterSettings:
    """With Algorithm 1; moves by work are in test_relief.py."""
    return ClusterSettings(
        rebalance_every_s=5.0, planning_window_s=8.0, max_replicas=1, placement=Placement.KVPR, **more
    )  # type: ignore[arg-type]


def beside(
    neighbour_kv_bytes: int,
    settings: ClusterSettings,
    waiting: tuple[int, int] = (3, 3),
    neighbour_bytes: int = 100,
    short_s: tuple[float, float] = (0.0, 0.0),
) -> World:
    """Requests of two models wait on one device (so many of each); on the other one that is seldom asked holds so much
    KV (none: it is idle), long enough for rebalancing to look several times. On both, requests wait for memory so
    long."""
    w = World(settings, [model_spec("a", 200), model_spec("b", 200), model_spec("c", neighbour_bytes)])
    w.join(*node_devices("n", 1))
    for model in (A, B):
        _serve(w, model)
    w.join(*node_devices("x", 1))
    _serve(w, C)
    assert {k[0]: i.devices[0] for k, i in w.live.items()} == {A: HERE, B: HERE, C: THERE}
    for _ in range(40):
        w.arrive(A, 3)
        w.arrive(B, 2)
        _report(w, neighbour_kv_bytes, dict(zip((A, B), waiting, strict=True)), short_s)
        w.pass_time(0.5)
        for key, instance in list(w.live.items()):
            if instance.state == "loading":
                w.activated(key)
    return w


def _serve(w: World, model: ModelName) -> None:
    w.arrive(model, 1)
    w.pass_time(0.5)
    w.step()
    w.step()


def _report(
    w: World, neighbour_kv_bytes: int, waiting: dict[ModelName, int], short_s: tuple[float, float] = (0.0, 0.0)
) -> None:
    pressed, neighbour = [], []
    for key, instance in w.live.items():
        if key.model == C:
            runs = 5 if neighbour_kv_bytes else 0
            neighbour.append(InstanceLoad(key, 100, neighbour_kv_bytes, 0, runs, 0, 9))
        elif instance.devices == (HERE,):
            pressed.append(InstanceLoad(key, 200, KV_BYTES, 0, 5, waiting[key.model], 9))
    w.send(DeviceReport(HERE, 1000, 100, tuple(pressed), short_s[0]))
    w.send(DeviceReport(THERE, 1000, 100, tuple(neighbour), short_s[1]))


def moves(w: World) -> list[Activate]:
    return [e for _, e in w.log if isinstance(e, Activate) and e.reason.code is ReasonCode.MIGRATION]


@example(0)
@example(203)
@example(204)
@given(st.integers(0, 500))
def test_a_model_moves_only_to_where_less_memory_is_in_use_than_where_it_is(kv_bytes: int) -> None:
    w = beside(kv_bytes, settings())
    there = (200 + KV_BYTES + (100 + kv_bytes if kv_bytes else 0)) / 1000
    found = moves(w)
    assert bool(found) == (there < 0.9 * USE)
    if found:
        numbers = dict(found[0].reason.numbers)
        assert (numbers["use"], numbers["use_there"]) == pytest.approx((USE, there))


@pytest.mark.parametrize(("neighbour_bytes", "goes"), [(360, True), (400, False)])
def test_a_model_does_not_move_to_where_idle_ones_leave_less_than_it_has(neighbour_bytes: int, goes: bool) -> None:
    assert bool(moves(beside(0, settings(), neighbour_bytes=neighbour_bytes))) is goes, "760 bytes are taken here"


def test_the_papers_rule_does_not_look_at_memory_in_use() -> None:
    assert moves(beside(500, settings(migration=MigrationTest.PAPER)))


@example(9, 0)
@example(0, 9)
@given(st.integers(0, 9), st.integers(0, 9))
def test_who_waits_for_itself_stays(of_a: int, of_b: int) -> None:
    """Algorithm 1 wants ``b`` (fewer requests) to go; it does unless most of what waits is its own."""
    found = moves(beside(0, settings(), (of_a, of_b)))
    assert [e.model for e in found] == ([] if of_b > of_a else [B])


def test_a_queue_moves_to_where_memory_is() -> None:
    """Alone with its queue a model stays; if what waits lacks memory, it goes to where there is more."""
    stays, goes = (_alone(*case) for case in ((300, 0.0), (780, 1.0)))
    assert (stays, goes) == ([], [THERE])


def _alone(kv_bytes: int, short_s: float) -> list[DeviceId]:
    """Where a model of 200 bytes of weights with so much KV moves from beside an idle one."""
    w = World(settings(), [model_spec("a", 200), model_spec("b", 20)])
    w.join(*node_devices("n", 1))
    _serve(w, A)
    _serve(w, B)
    w.join(*node_devices("x", 1, memory=2000))
    for _ in range(40):
        w.arrive(A, 3)
        (key,) = (k for k, i in w.live.items() if k[0] == A and i.devices == (HERE,))
        w.send(DeviceReport(HERE, 1000, 0, (InstanceLoad(key, 200, kv_bytes, 0, 5, 3, 9),), short_s))
        if found := moves(w):
            return list(found[0].devices)
        w.pass_time(0.5)
    return []


@pytest.mark.parametrize(("short_s", "moves_on"), [(0.0, False), (1.0, True)])
def test_a_model_is_moved_within_its_planning_window_only_from_where_requests_wait_for_memory(
    short_s: float, moves_on: bool
) -> None:
    """And then not before loads have cost it less than a twentieth of its time."""
    w = beside(0, replace(settings(), planning_window_s=1000.0), short_s=(short_s, 0.0))
    found = moves(w)
    assert bool(found) is moves_on
    if found:
        model = found[0].model
        loaded_s, moved_s = [at_s for at_s, e in w.log if isinstance(e, Activate) and e.model == model]
        activation_s = w.scheduler.books.models[model].activation_s
        assert activation_s is not None
        assert moved_s - loaded_s >= 20.0 * activation_s


@pytest.mark.parametrize(("short_s", "carried"), [((0.0, 0.0), False), ((1.0, 0.0), True), ((1.0, 1.0), False)])
def test_what_a_moved_model_still_runs_gives_way_to_those_who_wait_for_memory(
    short_s: tuple[float, float], carried: bool
) -> None:
    """It goes on in the new place, unless memory is short there, too; where nobody waits for it, it ends in the old."""
    w = beside(0, settings(), short_s=short_s)
    (move,) = moves(w)
    (left_s, left), *hurried = [(at, e) for at, e in w.log if isinstance(e, Deactivate) and e.model == move.model]
    assert left.reason.code is ReasonCode.MIGRATED
    assert not left.carry
    assert [(e.key.generation, e.carry, e.reason.code) for _, e in hurried] == [
        (left.key.generation, True, ReasonCode.KV_PRESSURE)
    ] * carried
    assert all(at_s - left_s >= 0.25 for at_s, _ in hurried)
    w.check()
