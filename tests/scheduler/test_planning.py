"""Views and plans: looking changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.core.effects import decision_line
from prism.core.ids import ModelName
from prism.core.settings import ClusterSettings, PolicyName
from prism.scheduler.planning import plan, view
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, A, B, C, on, serve, world

CATALOG = [
    model_spec("a", 300, slo_ttft_s=0.5),
    model_spec("b", 400),
    model_spec("c", 450, keep_alive_s=5.0),
    model_spec("d", 700, max_wait_s=6.0),
    model_spec("e", 800, tp=2),
]
POLICIES = {
    "prism": ClusterSettings(rebalance_every_s=2.0, planning_window_s=3.0),
    "quiet": ClusterSettings(rebalance_every_s=0.0),
    "expected": ClusterSettings(rebalance_every_s=2.0, expected_rates=(("a", 4.0), ("b", 1.0))),
    "static": ClusterSettings(policy=PolicyName.STATIC),
    "qlm": ClusterSettings(policy=PolicyName.QLM),
}
seconds = st.sampled_from([0.1, 0.5, 2.0, 7.0, 70.0])
scripts = st.lists(st.tuples(st.sampled_from([m.name for m in CATALOG]), st.integers(0, 6), seconds), max_size=25)


def decisions(policy: ClusterSettings, script: list[tuple[ModelName, int, float]], looks: int) -> list[str]:
    """What is decided when somebody looks so many times after everything that happens."""
    w = World(policy, CATALOG)
    w.join(*node_devices("n", 3))
    for model, requests, pause_s in script:
        if requests:
            w.arrive(model, requests)
        for _ in range(looks):
            plan(w.scheduler, w.now)
            view(w.scheduler, w.now)
        w.pass_time(pause_s)
        w.step()
    return [decision_line(effect, at_s) for at_s, effect in w.log]


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=25)
@given(script=scripts)
def test_looking_any_number_of_times_changes_no_decision(
    policy: str, script: list[tuple[ModelName, int, float]]
) -> None:
    seen = decisions(POLICIES[policy], script, looks=0)
    assert decisions(POLICIES[policy], script, looks=1) == seen
    assert decisions(POLICIES[policy], script, looks=3) == seen


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_the_board_stands_between_refreshes_whoever_looks(looks: int) -> None:
    """Where a model goes did depend on it: looking brought the rates of those that nobody asks for any more to 0."""
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 300), devices=2)
    for model in (A, A, A, B):
        serve(w, model)
    w.pass_time(300.0)
    for _ in range(looks):
        shown = view(w.scheduler, w.now)
        assert [d.weighted_rate for d in shown.devices] == pytest.approx([0.0, 0.0]), "a view is as of now"
        assert all(m.weighted_rate == 0.0 for m in shown.models)
        plan(w.scheduler, w.now)
    serve(w, C)
    assert (on(w, A), on(w, C)) == ((GB0,), (GB1,))
