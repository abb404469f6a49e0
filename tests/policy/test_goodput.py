"""Goodput of a device by who shares it, and the move or exchange that gains most, against all others."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName
from prism.policy.goodput import Neighbour, SharingModel, Site, best_relief, met_per_s

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


def named(prefix: str, found: list[SharingModel]) -> dict[str, SharingModel]:
    return {
        f"{prefix}{i}": SharingModel(ModelName(f"{prefix}{i}"), t.rate_per_s, t.duty, t.share, t.bearable, 10.0, 100)
        for i, t in enumerate(found)
    }


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


def site(name: str, models: dict[str, SharingModel]) -> Site:
    return Site(DeviceId(name), MEMORY, tuple(models.values()))


def neighbour(name: str, models: dict[str, SharingModel]) -> Neighbour:
    room = MEMORY - sum(t.weight_bytes + t.kv_bytes for t in models.values())
    return Neighbour(site(name, models), room, tuple(models.values()))


few = st.lists(tenants, max_size=3)


@given(few, st.lists(few, min_size=1, max_size=3), st.sampled_from([0.0, 0.1, 0.5]))
def test_relief_is_the_best_of_all_moves_else_of_all_exchanges(
    here: list[SharingModel], there: list[list[SharingModel]], price: float
) -> None:
    """By trying every single one and adding up what all devices meet anew."""
    models = {"here": named("h", here)}
    models |= {f"d{k}": named(f"d{k}m", found) for k, found in enumerate(there)}
    devices = {name: neighbour(name, m) for name, m in models.items()}
    needs = dict.fromkeys([ModelName(m) for ms in models.values() for m in ms], 110)

    def total(assignment: dict[str, dict[str, SharingModel]]) -> float:
        return sum(site(name, m).met_per_s for name, m in assignment.items())

    def gain(goes: str, to: str, comes: str | None) -> float:
        then = {name: dict(m) for name, m in models.items()}
        then[to][goes] = then["here"].pop(goes)
        if comes is not None:
            then["here"][comes] = then[to].pop(comes)
        return total(then) - total(models)

    others = list(models)[1:]
    moves = list(itertools.product(models["here"], others, [None]))
    swaps = [(m, d, u) for m, d, _ in moves for u in models[d]]
    found = best_relief(devices["here"], [devices[d] for d in others], needs, price)
    best_move = max((gain(*m) for m in moves), default=0.0)
    best_swap = max((gain(*s) for s in swaps), default=0.0)
    if found is None:
        assert best_move <= price + 1e-6
        assert best_swap <= 2 * price + 1e-6
    elif found.comes is None:
        assert found.gain == pytest.approx(best_move, abs=1e-6)
    else:
        assert best_move <= price + 1e-6
        assert found.gain == pytest.approx(best_swap, abs=1e-6)
        assert found.gain > 2 * price


def test_what_does_not_fit_does_not_move() -> None:
    busy = named("h", [tenant("", 1.0), tenant("", 1.0), tenant("", 1.0)])
    free = Neighbour(site("d", {}), 50.0, ())
    assert best_relief(neighbour("here", busy), [free], dict.fromkeys(map(ModelName, busy), 110), 0.0) is None
