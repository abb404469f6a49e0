"""What a step costs: against engines that share a device, and what is learned of one that is not as guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.device_time import (
    Batch,
    DeviceRates,
    TimeCorrections,
    alone_s,
    bandwidth_share,
    room_within,
    slowdown,
    step_of,
)

RATES = DeviceRates(2e-3, 1e-5, 1e12)
batches = st.builds(Batch, st.integers(10**9, 10**11), st.integers(0, 10**11), st.integers(1, 500))


@given(batches)
def test_a_step_is_its_reading_and_the_hosts_time(batch: Batch) -> None:
    reading_s = bandwidth_share(RATES, batch) * alone_s(RATES, batch)
    assert reading_s == pytest.approx((batch.weight_bytes + batch.kv_bytes) / RATES.bytes_per_s)
    assert 0.0 < bandwidth_share(RATES, batch) < 1.0
    both = step_of(RATES, batch.weight_bytes + batch.kv_bytes, batch.sequences)
    assert both == (alone_s(RATES, batch), bandwidth_share(RATES, batch))


@given(st.lists(batches, min_size=1, max_size=6))
def test_together_they_read_no_faster_than_the_device_can(together: list[Batch]) -> None:
    """And alone, or while the device has bandwidth left, nobody is slowed down."""
    crowd = slowdown(sum(bandwidth_share(RATES, b) for b in together))
    bytes_per_s = sum((b.weight_bytes + b.kv_bytes) / (alone_s(RATES, b) * crowd) for b in together)
    assert bytes_per_s <= RATES.bytes_per_s * (1 + 1e-9)
    assert crowd == 1.0 or bytes_per_s == pytest.approx(RATES.bytes_per_s)


@given(st.integers(10**9, 5 * 10**10), st.integers(10**5, 10**9), st.floats(1e-3, 1.0))
def test_room_is_the_most_that_keeps_the_time(weight_bytes: int, each_bytes: int, token_s: float) -> None:
    room = int(room_within(RATES, weight_bytes, each_bytes, token_s))
    times = [alone_s(RATES, Batch(weight_bytes, n * each_bytes, n)) for n in (room, room + 2)]
    assert times[1] > token_s
    assert room == 0 or times[0] <= token_s * (1 + 1e-9)


@given(st.floats(0.2, 5.0), st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_what_is_slower_than_guessed_is_learned_by_model_and_device(
    device_factor: float, model_factors: list[float], rng: object
) -> None:
    corrections = TimeCorrections()
    truth = {f"m{i}": f for i, f in enumerate(model_factors)}
    assert corrections.error_of("d") is None
    for _ in range(60):
        for model, factor in truth.items():
            corrections.observe("d", model, corrections.factor("d", model) * 0.01, 0.01 * factor * device_factor)
    for model, factor in truth.items():
        assert corrections.factor("d", model) == pytest.approx(factor * device_factor, rel=0.02)
    error = corrections.error_of("d")
    assert error is not None and error < 0.15


def test_what_a_device_taught_helps_with_a_model_that_is_new_there() -> None:
    corrections = TimeCorrections()
    for _ in range(200):
        for model in ("a", "b", "c"):
            said_s = corrections.factor("slow", model) * 0.01
            corrections.observe("slow", model, said_s, 0.03)
            corrections.observe("fast", model, corrections.factor("fast", model) * 0.01, 0.01)
    assert corrections.factor("slow", "new") > 1.5 * corrections.factor("fast", "new")


def test_one_wild_observation_changes_little() -> None:
    corrections = TimeCorrections()
    corrections.observe("d", "m", 0.01, 10.0)
    assert corrections.factor("d", "m") < 16.0
    for _ in range(1000):
        corrections.observe("d", "m", 0.01, 10.0)
    assert corrections.factor("d", "m") <= 16.0**2 * (1 + 1e-9), "each of both is bounded"
