"""A profile stands where there would be a guess, on the devices for which it was made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.specs import DeviceKind, DeviceRates, ModelProfile, ModelSpec
from prism.policy.device_time import GUESSES
from prism.policy.profiles import kept_for_bursts, prefill_on, profile_on, rates_on
from tests.scheduler.cluster_world import model_spec

RATES = DeviceRates(1e-3, 2e-5, 1e12)
PLAIN = model_spec("a", 100)
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
