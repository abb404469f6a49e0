"""The prefill speed converges on what is measured, also when prompts share a step or engines share a device."""

from __future__ import annotations

import pytest

from prism.policy.latency_model import PrefillSpeed, SharedClock, retry_after_s


def test_the_guess_gives_way_to_what_is_measured() -> None:
    speed = PrefillSpeed(100.0)
    assert speed.seconds(50) == pytest.approx(0.5)
    for _ in range(100):
        speed.observe(500, 0.25)
    assert speed.tokens_per_s == pytest.approx(2000.0, rel=0.05)


def test_prompts_that_share_a_step_do_not_look_infinitely_fast() -> None:
    speed = PrefillSpeed(1000.0)
    for _ in range(50):
        speed.observe(300, 0.1)
        speed.observe(200, 0.0)
    assert speed.tokens_per_s == pytest.approx(5000.0, rel=0.05)


def test_the_speed_follows_a_change() -> None:
    speed = PrefillSpeed(1000.0)
    for _ in range(100):
        speed.observe(1000, 1.0)
    for _ in range(30):
        speed.observe(100, 1.0)
    assert speed.tokens_per_s == pytest.approx(100.0, rel=0.2)


def test_the_clock_runs_slower_while_several_prefill() -> None:
    clock = SharedClock()
    clock.advance(10.0)
    clock.sharers = 2
    before_s = clock.advance(10.0)
    assert clock.advance(14.0) - before_s == pytest.approx(2.0)
    clock.sharers = 0
    assert clock.advance(15.0) - before_s == pytest.approx(3.0)
    assert clock.advance(9.0) == clock.advance(15.0), "it never goes back"


def test_retry_after_is_when_a_newcomer_could_be_on_time_and_bounded() -> None:
    assert retry_after_s(30.0, slo_s=10.0) == 20.0
    assert retry_after_s(0.5, slo_s=10.0) == 1.0
    assert retry_after_s(1e9) == 120.0
