"""The map that models begin with: at least as good as those of the rivals' search, by the same estimate."""

from __future__ import annotations

from dataclasses import replace

from prism.core.ids import DeviceId, ModelName
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec
from prism.policy.fixed_map import Places, candidates
from prism.policy.goodput_map import goodput_places, planned_site
from prism.policy.mux_estimate import PlannedLoad
from tests.scheduler.cluster_world import model_spec
from tests.scheduler.exchange import node_devices

GB = 10**9
GPUS = [replace(d, kind=DeviceKind.CUDA) for d in node_devices("n", 2, 80 * GB)]


def models(*gigabytes: float) -> list[ModelSpec]:
    return [
        model_spec(f"m{i}", int(gb * GB), slo_tpot_s=2.0 * (2.5e-3 + gb * GB / 2.2e12), min_kv_bytes=GB)
        for i, gb in enumerate(gigabytes)
    ]


def met(places: Places, specs: list[ModelSpec], loads: dict[ModelName, PlannedLoad], gpus: list[DeviceSpec]) -> float:
    on = {d.id: [(m, loads[m.name]) for m in specs if d.id in places.get(m.name, ())] for d in gpus}
    return sum(planned_site(d, on[d.id]).met_per_s for d in gpus)


def test_it_is_no_worse_than_any_candidate() -> None:
    specs = models(16, 3, 6, 16, 3, 6, 15, 14)
    rates = (14.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5)
    loads = {m.name: PlannedLoad(r, 140.0, 250.0) for m, r in zip(specs, rates, strict=True)}
    found = goodput_places(specs, GPUS, loads, 2048)
    assert set(found) == {m.name for m in specs}
    best = max(met(places, specs, loads, GPUS) for places in candidates(specs, GPUS, loads, 2048))
    assert met(found, specs, loads, GPUS) >= best - 1e-9


def test_what_nobody_asks_for_has_no_place() -> None:
    specs = models(16, 16)
    loads = {specs[0].name: PlannedLoad(1.0), specs[1].name: PlannedLoad(0.0)}
    assert set(goodput_places(specs, GPUS, loads, 2048)) == {specs[0].name}
    assert goodput_places(specs, [], loads, 2048) == {}


def test_two_that_are_always_busy_part() -> None:
    specs = models(16, 16)
    loads = {m.name: PlannedLoad(5.0, 140.0, 250.0) for m in specs}
    places = goodput_places(specs, GPUS, loads, 2048)
    assert set(places.values()) == {(DeviceId(d.id),) for d in GPUS}


def test_models_that_a_burst_makes_hopeless_stand_where_the_mean_of_them_is_met() -> None:
    """Eight times as much as expected leaves the two busy ones late wherever they are."""
    specs = models(6, 28, 28, 16, 3)
    rates, prompts = (0.05, 0.3, 1.0, 0.1, 0.1), (140.0, 140.0, 140.0, 140.0, 12_000.0)
    loads = {m.name: PlannedLoad(r, p, 250.0) for m, r, p in zip(specs, rates, prompts, strict=True)}
    places = goodput_places(specs, GPUS, loads, 2048)
    assert places[specs[1].name] != places[specs[2].name]
    assert met(places, specs, loads, GPUS) > 0.99 * sum(rates)
