"""Simulated scale-outs: everything is answered, faster ways of loading are faster, and the papers' orders come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.live.choice import ScaleWay
from prism.sim.gpus import gpu
from prism.sim.live_arrivals import LiveLinks, LiveSystem, ScaleOutRequest, plan_arrivals
from prism.sim.live_scaling import LiveFleet, LiveOutcome, LiveScaling
from prism.sim.live_server import LiveJob, LiveServer
from prism.sim.models import known_spec

SPEC = known_spec("m", "meta-llama/Llama-2-13b-chat-hf", 1.0, 0.1)
LOADING: list[LiveSystem] = [s for s in LiveSystem if s is not LiveSystem.PRISM]
WANTED = ScaleOutRequest(26 << 30, 40, ("s0", "s1"), tuple(f"r{i}" for i in range(8)))


def burst(count: int, every_s: float = 0.0, at_s: float = 0.0) -> list[LiveJob]:
    return [LiveJob(at_s + i * every_s, 128, 64) for i in range(count)]


def play(system: LiveSystem, jobs: list[LiveJob], **more: object) -> LiveOutcome:
    known: dict[str, object] = {"machines": 9, "batch": 32}
    return LiveScaling(system, LiveFleet(SPEC, gpu("H800"), **{**known, **more}), jobs).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("system", LOADING)
def test_every_receiver_gets_everything_after_its_first_layers(system: LiveSystem) -> None:
    arrivals = plan_arrivals(system, WANTED, LiveLinks())
    assert arrivals.receivers.keys() == set(WANTED.receivers)
    for receiver in arrivals.receivers.values():
        assert 0.0 <= receiver.first_s <= receiver.alone_s
        assert receiver.pipeline is None or arrivals.ready_s[receiver.pipeline] <= receiver.alone_s
    link_s = WANTED.nbytes / max(LiveLinks().network_bytes_s, LiveLinks().host_bytes_s)
    assert system is LiveSystem.IDEAL or min(r.alone_s for r in arrivals.receivers.values()) >= 0.99 * link_s


def test_the_papers_order_of_the_last_byte() -> None:
    last: dict[LiveSystem, float] = {
        s: max(r.alone_s for r in plan_arrivals(s, WANTED, LiveLinks()).receivers.values()) for s in LOADING
    }
    order = [LiveSystem.ALLCACHE, LiveSystem.PIPELINES, LiveSystem.NCCL, LiveSystem.FAASNET, LiveSystem.SERVERLESSLLM]
    assert [last[s] for s in order] == sorted(last[s] for s in order)


def test_more_sources_hold_the_model_together_sooner() -> None:
    ready = []
    for k in (1, 2, 4):
        sources = tuple(f"s{i}" for i in range(k))
        wanted = replace(WANTED, sources=sources, blocks=16)
        ready.append(min(plan_arrivals(LiveSystem.PIPELINES, wanted, LiveLinks()).ready_s.values()))
    assert ready[0] > 1.6 * ready[1] > 1.6 * 1.6 * ready[2]


def test_serving_while_loading_makes_more_tokens_and_ideal_most() -> None:
    made = {}
    for system in (LiveSystem.SERVERLESSLLM, LiveSystem.FAASNET, LiveSystem.PIPELINES, LiveSystem.IDEAL):
        outcome = play(system, burst(300), machines=10, start_with=2, at_once=8, most_sources=2)
        made[system] = sum(outcome.tokens[i] for i in range(8))
        assert all(job.made == job.answer_tokens for job in outcome.jobs)
        assert sum(outcome.tokens.values()) == 300 * 64
    assert list(made.values()) == sorted(made.values())
    assert made[LiveSystem.PIPELINES] > 1.2 * made[LiveSystem.FAASNET]


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(LiveSystem)),
    st.lists(st.tuples(st.floats(0, 4), st.integers(1, 600), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_every_request_is_answered_whole(
    system: LiveSystem, asked: list[tuple[float, int, int]], start_with: int, cached: int
) -> None:
    jobs = [LiveJob(*one) for one in sorted(asked)]
    outcome = play(system, jobs, start_with=start_with, cached=cached, machines=6)
    for job in jobs:
        assert job.made == job.answer_tokens and job.first_s is not None and job.end_s is not None
        assert job.arrival_s < job.first_s <= job.end_s
    assert start_with <= outcome.most <= 6
    assert outcome.device_s >= start_with * max(j.end_s or 0.0 for j in jobs) * 0.999


def test_the_load_decides_up_at_once_and_down_again() -> None:
    jobs = burst(10, 0.5) + burst(400, 0.01, 5.0) + burst(10, 1.0, 20.0)
    outcome = play(LiveSystem.PRISM, jobs)
    assert outcome.most > 4
    assert outcome.device_s < 0.7 * outcome.most * (jobs[-1].end_s or 0.0), "they leave when the burst is over"
    assert outcome.choices and outcome.choices[0].way is not ScaleWay.WAIT
    fixed = play(LiveSystem.IDEAL, burst(10, 0.5), machines=3, start_with=3)
    assert fixed.most == 3


def test_a_run_is_the_same_each_time() -> None:
    def told() -> tuple[object, ...]:
        outcome = play(LiveSystem.PRISM, burst(200, 0.01))
        return outcome.ttft_s(), outcome.device_s, outcome.tokens

    assert told() == told()


def test_one_that_serves_is_paired_with_one_newcomer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LiveServer] = []

    class Seen(LiveServer):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr("prism.sim.live_scaling.LiveServer", Seen)
    play(LiveSystem.ZIGZAG, burst(40, every_s=0.05) + burst(400, every_s=0.005, at_s=2.0))
    orders = {server.began_s for server in made if server.paired}
    assert len(orders) > 1
    for begun_s in orders:
        loading = [s for s in made if s.paired and s.began_s <= begun_s < s.alone_s]
        assert len(loading) <= sum(s.alone_s <= begun_s for s in made)
