"""Goodput of a device by who shares it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import ModelName
from prism.policy.goodput import SharingModel, met_per_s

MEMORY = 1000.0


def tenant(name: str, duty: float = 0.5, share: float = 0.7, rate: float = 1.0, bearable: float = 2.0) -> SharingModel:
    return SharingModel(ModelName(name), rate, duty, share, bearable, 10.0, 100)


tenants = st.builds(
    tenant,
    st.just(""),
    st.floats(0.0, 1.0),
    st.floats(0.1, 0.9),
    st.floats(0.0, 5.0),
    st.floats(0.5, 3.0),
)


def test_it_agrees_with_models_that_decode_by_chance() -> None:
    """Many moments drawn: how often the sum of shares stays within what the model can bear."""
    here = [tenant(f"m{i}", duty, 0.6) for i, duty in enumerate((0.2, 0.5, 0.7, 0.3, 0.4, 0.6))]
    rng, counted, draws = random.Random(1), 0.0, 20_000
    for _ in range(draws):
        busy = [t.share if rng.random() < t.duty else 0.0 for t in here]
        unsure = rng.gauss(0.0, 0.15)
        counted += sum(sum(busy) - busy[i] + t.share + unsure <= t.bearable for i, t in enumerate(here))
    assert met_per_s(here, MEMORY) == pytest.approx(counted / draws, rel=0.1)


@given(st.lists(tenants, min_size=1, max_size=6))
def test_nobody_gains_by_a_neighbour(found: list[SharingModel]) -> None:
    *others, last = found
    assert met_per_s(found, MEMORY) <= met_per_s(others, MEMORY) + met_per_s([last], MEMORY) + 1e-9
    assert 0.0 <= met_per_s(found, MEMORY) <= sum(t.rate_per_s for t in found) + 1e-9


def test_a_model_that_misses_alone_counts_only_as_a_burden() -> None:
    hopeless, other = tenant("a", 1.0, rate=50.0, bearable=0.9), tenant("b", bearable=3.0)
    assert met_per_s([hopeless], MEMORY) == 0.0
    assert met_per_s([hopeless, other], MEMORY) < met_per_s([other], MEMORY)


def test_full_memory_counts() -> None:
    full = SharingModel(ModelName("a"), 1.0, 0.1, 0.5, 3.0, 950.0, 10)
    assert met_per_s([full], MEMORY) < 0.5 < met_per_s([tenant("a", 0.1, 0.5)], MEMORY)
