"""Places and moves by goodput: busy models come apart, by slow steps alone; two change places where no move helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import ActivationError, CatalogChanged, DeviceReport, InstanceLoad, OperatorLoad
from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, Placement
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec
from prism.scheduler.places import Places
from prism.scheduler.planning import plan
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices

GB = 10**9
HERE, THERE = DeviceId("n/cuda:0"), DeviceId("x/cuda:0")
SETTINGS = ClusterSettings(placement=Placement.GOODPUT, rebalance_every_s=5.0, planning_window_s=60.0, max_replicas=1)


def gpu(id: DeviceId, gigabytes: int = 80) -> DeviceSpec:
    (spec,) = node_devices(id.split("/")[0], 1, gigabytes * GB)
    return replace(spec, id=id, kind=DeviceKind.CUDA)


def model(name: str, gigabytes: float, tpot_s: float = 0.012) -> ModelSpec:
    return model_spec(name, int(gigabytes * GB), slo_tpot_s=tpot_s, min_kv_bytes=GB)


class Gpus:
    """Two GPUs; what each model does there is said second by second."""

    def __init__(
        self,
        here: dict[str, float],
        there: dict[str, float],
        tpot_s: float = 0.012,
        settings: ClusterSettings = SETTINGS,
    ) -> None:
        self.moves_fail = False
        self.w = World(settings, [model(n, gb, tpot_s) for n, gb in {**here, **there}.items()])
        for device, names in ((HERE, here), (THERE, there)):
            self.w.join(gpu(device))
            for name in names:
                self.w.arrive(ModelName(name))
                self.w.pass_time(0.6)
                self.w.step()

    def run(self, seconds: int, running: dict[str, int], kv_gb: float = 4.0) -> None:
        for _ in range(seconds):
            for name, count in running.items():
                if count:
                    self.w.arrive(ModelName(name))
            for device in list(self.w.devices):
                loads = [
                    InstanceLoad(
                        k, i.weight, int(kv_gb * GB) if running.get(k.model) else 0, 0, running.get(k.model, 0), 0, 9
                    )
                    for k, i in self.w.live.items()
                    if device in i.devices and i.state == "ready"
                ]
                self.w.send(DeviceReport(device, 80 * GB, 0, tuple(loads)))
            self.w.pass_time(1.0)
            for key, instance in list(self.w.live.items()):
                if instance.state == "loading" and self.moves_fail and str(key.model) in self.moves:
                    self.w.failed(key, ActivationError.TIMEOUT)
                elif instance.state == "loading":
                    self.w.activated(key)
                elif instance.state == "draining":
                    self.w.gone(key)

    @property
    def on(self) -> dict[str, DeviceId]:
        return {str(k.model): i.devices[0] for k, i in self.w.live.items()}

    @property
    def moves(self) -> list[str]:
        return [e.model for _, e in self.w.log if isinstance(e, Activate) and e.reason.code is ReasonCode.MIGRATION]

    @property
    def made_room(self) -> list[str]:
        """Who left before it was loaded elsewhere."""
        effects = [e for _, e in self.w.log if isinstance(e, Deactivate) and e.reason.code is ReasonCode.EXCHANGE]
        return [str(e.key.model) for e in effects]


def test_two_busy_models_part_because_their_steps_are_slow_though_nothing_waits() -> None:
    gpus = Gpus({"a": 16.0, "b": 16.0}, {})
    gpus.run(40, {"a": 20, "b": 20})
    assert len(gpus.moves) == 1
    assert set(gpus.on.values()) == {HERE, THERE}


@pytest.mark.parametrize(
    ("running", "tpot_s"),
    [({"a": 20, "b": 0}, 0.02), ({"a": 20, "b": 20}, 0.1)],
    ids=["one is idle", "steps are fast enough"],
)
def test_what_slows_nobody_below_his_objective_stays(running: dict[str, int], tpot_s: float) -> None:
    gpus = Gpus({"a": 16.0, "b": 16.0}, {}, tpot_s)
    gpus.run(40, running)
    assert gpus.moves == []


def test_a_large_and_a_small_model_change_places_where_no_move_pays() -> None:
    """Two large busy ones here, two small busy ones there: three on one GPU would be too many for a large one."""
    gpus = Gpus({"a": 34.0, "b": 34.0}, {"c": 3.3, "d": 3.3, "idle": 34.0}, tpot_s=0.026)
    gpus.run(150, {"a": 20, "b": 20, "c": 20, "d": 20}, kv_gb=0.2)
    assert len(gpus.moves) == 2
    assert {gpus.on["a"], gpus.on["b"]} == {gpus.on["c"], gpus.on["d"]} == {HERE, THERE}


@pytest.mark.parametrize("ample", [True, False])
def test_where_memory_is_ample_nothing_moves_only_to_be_held_back_elsewhere(
    ample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three busy ones on each GPU, of which two have the bandwidth: three and three, or two and four, two are served
    on each. By who runs on average it would pay that one device is given up for the other."""
    monkeypatch.setattr(Places, "all_have_room", lambda _: ample)
    gpus = Gpus(dict.fromkeys("abc", 16.0), dict.fromkeys("def", 16.0), tpot_s=0.016)
    gpus.run(60, dict.fromkeys("abcdef", 20), kv_gb=0.2)
    assert bool(gpus.moves) is not ample


def full_gpus(on: bool = True) -> Gpus:
    """Two models that are always busy here, two that hardly are there; nothing else fits anywhere."""
    return Gpus({"a": 34.0, "b": 34.0}, {"c": 34.0, "d": 34.0}, 0.026, replace(SETTINGS, exchanges=on))


def seconds_of(gpus: Gpus, tens: int) -> None:
    for _ in range(tens):
        gpus.run(9, {"a": 20, "b": 20, "c": 0, "d": 0}, kv_gb=0.2)
        gpus.run(1, {"a": 20, "b": 20, "c": 1, "d": 1}, kv_gb=0.2)


def test_two_models_change_places_though_neither_device_has_room_for_both() -> None:
    gpus = full_gpus()
    seconds_of(gpus, 20)
    assert len(gpus.moves) == 2
    assert {gpus.on["a"], gpus.on["b"]} == {gpus.on["c"], gpus.on["d"]} == {HERE, THERE}
    assert gpus.made_room == [gpus.moves[1]]


def test_they_stay_unless_exchanges_are_wanted() -> None:
    gpus = full_gpus(on=False)
    seconds_of(gpus, 20)
    assert gpus.moves == []


def test_whoever_left_first_is_not_kept_away_when_the_other_one_cannot_be_loaded() -> None:
    gpus = full_gpus()
    gpus.moves_fail = True
    seconds_of(gpus, 20)
    assert gpus.made_room
    gpus.moves_fail = False
    seconds_of(gpus, 6)
    assert set(gpus.on) == set("abcd")


def test_a_busy_model_wakes_beside_idle_ones_rather_than_beside_a_busy_one() -> None:
    """The idle ones hold more memory; that slows nobody down."""
    gpus = Gpus({"a": 16.0}, {"c": 16.0, "d": 16.0})
    gpus.w.specs[ModelName("b")] = model("b", 16.0)
    gpus.run(30, {"a": 30, "c": 0, "d": 0})
    gpus.w.send(CatalogChanged((model("b", 16.0),)))
    gpus.w.arrive(ModelName("b"))
    assert gpus.on["b"] == THERE


def test_plan_shows_the_moves_that_would_be_made() -> None:
    gpus = Gpus({"a": 16.0, "b": 16.0}, {}, settings=replace(SETTINGS, rebalance_every_s=1000.0))
    gpus.run(40, {"a": 20, "b": 20})
    before = len(gpus.w.log)
    planned = {d.model: d.action for d in plan(gpus.w.scheduler, gpus.w.now)}
    assert sorted(planned.values()) == ["move", "stay"]
    assert len(gpus.w.log) == before


def test_models_begin_where_the_map_of_what_is_expected_has_them() -> None:
    """The two busy ones apart, whatever the order in which they are asked for; memory alone would put them together."""
    rates = (("a", 5.0), ("b", 5.0), ("c", 0.01), ("d", 0.01))
    expecting = replace(SETTINGS, expected_rates=rates)
    w = World(expecting, [model("a", 16.0), model("b", 16.0), model("c", 30.0), model("d", 30.0)])
    for device in (HERE, THERE):
        w.join(gpu(device))
    for name in "cabd":
        w.send(OperatorLoad(ModelName(name)))
    on = {str(k.model): i.devices[0] for k, i in w.live.items()}
    assert {on["a"], on["b"]} == {HERE, THERE}
    assert set(on) == set("abcd")
