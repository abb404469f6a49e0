"""Goodput of a device by who shares it."""

from __future__ import annotations

import random
from itertools import chain, combinations
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import ModelName
from prism.policy.goodput import SharingModel, admitted_per_s, met_per_s

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


usual = st.lists(st.builds(tenant, st.just(""), st.floats(0.1, 0.98), st.floats(0.1, 0.9), st.floats(0.1, 5.0),
                           st.floats(0.5, 3.0)), min_size=1, max_size=5)  # fmt: skip
ROOMY = 1e9


def sets(of: tuple[SharingModel, ...]) -> list[tuple[SharingModel, ...]]:
    return list(chain.from_iterable(combinations(of, n) for n in range(len(of) + 1)))


@given(usual)
def test_whoever_wants_to_decode_those_are_let_in_that_meet_most(found: list[SharingModel]) -> None:
    """By trying, for every set of models that want to decode, every part of it."""
    here = tuple(SharingModel(ModelName(f"{i}"), *t_fields(t)) for i, t in enumerate(found))

    def met(together: tuple[SharingModel, ...]) -> float:
        crowd = sum(t.share for t in together)
        return sum(
            t.rate_per_s / t.duty * NormalDist().cdf((t.bearable - crowd) / 0.15) for t in together if t.bearable >= 1.0
        )

    expected = 0.0
    for wanting in sets(here):
        chance = 1.0
        for t in here:
            chance *= t.duty if t in wanting else 1.0 - t.duty
        expected += chance * max(met(part) for part in sets(wanting))
    assert admitted_per_s(here, ROOMY) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def t_fields(t: SharingModel) -> tuple[float, float, float, float, float, int]:
    return t.rate_per_s, t.duty, t.share, t.bearable, t.kv_bytes, t.weight_bytes


@given(usual)
def test_who_is_held_back_costs_nobody_anything_and_nobody_gains_by_a_neighbour(found: list[SharingModel]) -> None:
    *others, last = found
    alone, before, together = (admitted_per_s(tenants, ROOMY) for tenants in ([last], others, found))
    assert before - 1e-6 <= together <= before + alone + 1e-6


def test_of_two_that_cannot_decode_at_once_one_is_served() -> None:
    """Where everybody were let in both would be late."""
    here = [tenant("a", 0.98, 0.9, bearable=1.2), tenant("b", 0.98, 0.9, bearable=1.2)]
    assert met_per_s(here, ROOMY) < 0.05
    assert admitted_per_s(here, ROOMY) == pytest.approx(1.0, rel=0.05)


def test_of_many_models_the_busiest_count() -> None:
    rare = [tenant(f"rare-{i}", 0.1, 0.01, rate=0.01) for i in range(20)]
    busy = [tenant(f"busy-{i}", 0.9, 0.5, bearable=1.2) for i in range(3)]
    assert admitted_per_s(rare + busy, ROOMY) == pytest.approx(admitted_per_s(busy, ROOMY), abs=0.1)


def test_full_memory_counts_where_requests_are_held_back_too() -> None:
    full = SharingModel(ModelName("a"), 1.0, 0.1, 0.5, 3.0, 950.0, 10)
    assert admitted_per_s([full], MEMORY) < 0.5 < admitted_per_s([tenant("a", 0.1, 0.5)], MEMORY)
