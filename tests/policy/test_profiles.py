"""A profile stands where there would be a guess, on the devices for which it was made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.pace import DevicePace, LayerWork
from prism.core.specs import DeviceKind, DeviceRates, ModelProfile, ModelSpec
from prism.policy.device_time import GUESSES, Batch, alone_s, bandwidth_share, slowdown
from prism.policy.profiles import kept_for_bursts, prefill_on, profile_on, rates_on, step_rates
from tests.scheduler.cluster_world import model_spec

RATES = DeviceRates(1e-3, 2e-5, 1e12)
PLAIN = model_spec("a", 100)
LAYERED = replace(PLAIN, weight_bytes=10 << 20, shape=replace(PLAIN.shape, layers=4))
PROFILED = replace(PLAIN, profile=ModelProfile(DeviceKind.CUDA, RATES, 4e4, 70))


@pytest.mark.parametrize(
    ("model", "kind", "known"),
    [(PROFILED, DeviceKind.CUDA, True), (PROFILED, DeviceKind.HOST, False), (PLAIN, DeviceKind.CUDA, False)],
)
def test_it_holds_for_its_kind_of_device(model: ModelSpec, kind: DeviceKind, known: bool) -> None:
    assert (profile_on(model, kind) is not None) is known
    assert rates_on(model, kind) == (RATES if known else GUESSES[kind])
    assert prefill_on(model, kind, 7.0) == (4e4 if known else 7.0)
    assert kept_for_bursts([model, model], kind) == (140 if known else 0)


def test_what_is_known_of_steps_is_the_profile_then_the_declared_pace() -> None:
    pace = DevicePace(layer_s=2e-3)
    assert step_rates(PROFILED, DeviceKind.CUDA, None) == RATES
    assert step_rates(PLAIN, DeviceKind.HOST, None) is None
    assert step_rates(LAYERED, DeviceKind.HOST, DevicePace(prefill_token_s=1e-6)) is None
    assert step_rates(LAYERED, DeviceKind.HOST, pace) is not None


@pytest.mark.parametrize("layer_s", [2e-3, 1e-2])
def test_engines_of_a_paced_device_are_known_to_have_it_in_turns(layer_s: float) -> None:
    """By the guess a step took 2 ms, and two engines did not disturb each other."""
    pace = DevicePace(layer_s=layer_s, decode_sequence_s=1e-4)
    rates = step_rates(LAYERED, DeviceKind.HOST, pace)
    assert rates is not None
    batch = Batch(LAYERED.weight_bytes, 0, 1)
    declared_s = pace.seconds(LayerWork(layers=4, sequences=1))
    host_s = GUESSES[DeviceKind.HOST].step_s + GUESSES[DeviceKind.HOST].sequence_s
    assert alone_s(rates, batch) == pytest.approx(declared_s + host_s)
    turns = slowdown(2 * bandwidth_share(rates, batch))
    assert turns == pytest.approx(2 * 4 * layer_s / (declared_s + host_s))
    assert turns > 1.4
