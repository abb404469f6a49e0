"""A catalog becomes frozen objects with defaults filled in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from prism.config.catalog import Catalog, load_catalog
from prism.config.devices import resolve_devices
from prism.config.errors import CatalogError
from prism.config.sections.policy import PolicyConfig, catalog_key
from prism.core.errors import InvalidValue
from prism.core.ids import NodeId
from prism.core.pace import DevicePace
from prism.core.settings import ClusterSettings, GpuSettings, KvprMode, PolicySettings
from prism.core.specs import DeviceKind, LatePolicy, Scheduling
from prism.supervisor.fleet import settings_of

FULL = """
devices: [host:0, {id: host:1, memory: 64MiB, domain: x}]
defaults: {slo: {ttft: 1s, tpot: 50ms}, keep_alive: 5m, engine_args: {dtype: float32, random_seed: 1}}
models:
  - name: one
    path: m/one
    aliases: [uno]
    slo: {ttft: 300ms}
    engine_args: {random_seed: 2}
    late: reject
    max_wait: 3s
  - {name: two, path: org/two, keep_alive: null, pin: true}
policy: {name: static, tau: 0.5, rate_window: 10s}
keys:
  - {name: ops, key: opsopsops, admin: true}
  - {name: limited, key: limitedkey, requests_per_minute: 3, models: [un*]}
""".replace("[host:0,", "[{id: host:0, memory: 64MiB},")


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    file = tmp_path / "catalog.yaml"
    file.write_text(FULL)
    return load_catalog(file)


def test_models_inherit_defaults_key_by_key(catalog: Catalog) -> None:
    one, two = catalog.models
    assert (one.slo.ttft_s, one.slo.tpot_s) == (0.3, 0.05)
    assert one.engine_args == {"dtype": "float32", "random_seed": 2}
    assert one.late is LatePolicy.REJECT
    assert one.keep_alive_s == 300.0
    assert two.keep_alive_s is None, "an explicit null overrides the default"
    assert two.pinned
    assert two.slo.ttft_s == 1.0


def test_names_and_aliases(catalog: Catalog) -> None:
    assert catalog.resolve("uno") == "one"
    assert catalog.resolve("one") == "one"
    assert catalog.resolve("tre") is None
    assert catalog.near("onee")[0] == "one"
    with pytest.raises(InvalidValue) as caught:
        catalog.model("twoo")
    assert "two" in caught.value.choices


def test_a_model_can_be_written_out_again(catalog: Catalog) -> None:
    found = catalog.describe("uno")
    assert (found["name"], found["slo"], found["max_wait"]) == ("one", {"ttft": "300ms", "tpot": "50ms"}, "3s")
    again = catalog.file.with_name("again.yaml")
    again.write_text(yaml.safe_dump({"models": [found]}))
    assert load_catalog(again).models[0] == catalog.models[0]


def test_keys(catalog: Catalog) -> None:
    ops, limited = catalog.key_for("opsopsops"), catalog.key_for("limitedkey")
    assert ops is not None and ops.admin
    assert limited is not None and limited.requests_per_minute == 3
    assert catalog.key_for("nope") is None
    assert catalog.may_use(ops, "two")
    assert catalog.may_use(limited, "one"), "by its alias"
    assert not catalog.may_use(limited, "two")
    assert catalog.may_use(None, "two")


def test_a_rival_keeps_its_preset_for_what_is_not_written(catalog: Catalog) -> None:
    settings = catalog.policy.settings()
    preset = PolicySettings.named("static")
    assert settings.cluster.tau == 0.5
    assert settings.cluster.rate_window_s == 10.0
    assert settings.cluster.elastic_memory == preset.cluster.elastic_memory
    assert settings.gpu == preset.gpu


def test_every_policy_setting_has_a_key() -> None:
    wanted = {catalog_key(name) for kind in (ClusterSettings, GpuSettings) for name in kind.__dataclass_fields__}
    assert {key for key in PolicyConfig.__struct_fields__ if key != "name"} == wanted - {
        "policy",
        "live",
        "live_hop",
    }, "live_scaling has its own section"
    assert PolicyConfig().settings() == PolicySettings()
    assert PolicyConfig(kvpr=KvprMode.PAPER).settings().cluster.kvpr is KvprMode.PAPER


def test_devices(catalog: Catalog) -> None:
    node = NodeId("n")
    listed = resolve_devices(catalog, node, {})
    assert [device.id for device in listed] == ["n/host:0", "n/host:1"]
    assert listed[1].memory_bytes == 64 << 20
    assert listed[1].domain == "x"


def test_virtual_devices_may_play_a_speed_and_gpus_may_not(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    text = (
        "models: [{name: a, path: b}]\ndevices: [{id: ID, memory: 1GiB, pace: {layer: 2ms, decode_kv_token: 0.01us}}]"
    )
    file.write_text(text.replace("ID", "host:0"))
    (device,) = resolve_devices(load_catalog(file), NodeId("n"), {})
    assert device.pace == DevicePace(layer_s=0.002, decode_kv_token_s=1e-8)
    (joined,) = settings_of(load_catalog(file)).paced([replace(device, pace=None)])
    assert joined == device, "a machine that joins plays the same"
    file.write_text(text.replace("ID", "cuda:0"))
    with pytest.raises(CatalogError, match=r"pace.*a GPU has a speed of its own"):
        load_catalog(file)


def auto(tmp_path: Path, more: str = "") -> Catalog:
    file = tmp_path / "auto.yaml"
    file.write_text("models: [{name: a, path: b}]\n" + more)
    return load_catalog(file)


def test_auto_devices(tmp_path: Path) -> None:
    catalog, node = auto(tmp_path, "virtual: {count: 3, memory: 8MiB}"), NodeId("n")
    assert [d.kind for d in resolve_devices(catalog, node, {})] == [DeviceKind.HOST] * 3
    gpus = resolve_devices(catalog, node, {1: 1000, 0: 2000})
    assert [(d.id, d.memory_bytes) for d in gpus] == [("n/cuda:0", 1900), ("n/cuda:1", 950)]


@pytest.mark.parametrize(
    ("islands", "models", "domains"),
    [
        ((), "[{name: a, path: b}]", ["", "", "", ""]),
        (({0, 1, 2, 3},), "[{name: a, path: b}]", ["", "", "", ""]),
        (({0, 1}, {2, 3}), "[{name: a, path: b, tp: 2}]", ["n nvlink 0", "n nvlink 0", "x", "n nvlink 1"]),
        (({0, 3},), "[{name: a, path: b}]", ["n nvlink 0", "", "x", "n nvlink 0"]),
        (({0, 1}, {2, 3}), "[{name: a, path: b, tp: 4}]", ["", "", "x", ""]),  # it would fit nowhere
    ],
)
def test_nvlink_makes_domains_where_the_catalog_names_none(
    islands: tuple[set[int], ...], models: str, domains: list[str], tmp_path: Path
) -> None:
    listed = domains[2] == "x"
    file = tmp_path / "auto.yaml"
    file.write_text(
        f"models: {models}\n" + ("devices: [cuda:0, cuda:1, {id: cuda:2, domain: x}, cuda:3]" if listed else "")
    )
    memory = dict.fromkeys(range(4), 1 << 30)
    found = resolve_devices(load_catalog(file), NodeId("n"), memory, islands=[frozenset(i) for i in islands])
    assert [device.domain for device in found] == domains


def test_an_engine_is_not_granted_less_than_a_parked_one(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"less than engines\.parked_memory"):
        auto(tmp_path, "engines: {parked_memory: 2GiB, active_memory: 1GiB}")


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    catalog = auto(tmp_path, "devices: [cuda:0, cuda:3]")
    with pytest.raises(InvalidValue) as caught:
        resolve_devices(catalog, NodeId("n"), {0: 1 << 30, 1: 1 << 30})
    assert caught.value.value == "cuda:3"
    assert caught.value.choices == ("cuda:0", "cuda:1")
    catalog = auto(tmp_path, "devices: [{id: cuda:0, memory: 2GiB}]")
    with pytest.raises(InvalidValue, match="more than the GPU has"):
        resolve_devices(catalog, NodeId("n"), {0: 1 << 30})


def test_hundreds_of_models_read_no_files(tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("models:\n" + "".join(f"  - {{name: m{i}, path: not/there{i}}}\n" for i in range(500)))
    catalog = load_catalog(file)
    assert len(catalog.models) == 500
    assert catalog.resolve("m499") == "m499"


@pytest.mark.parametrize(("kept", "needs"), [("keep: false", "kv.keep"), ("keep: true", "kv.lend")])
def test_prompts_larger_than_a_device_need_a_place_for_their_kv(tmp_path: Path, kept: str, needs: str) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models: [{{name: m, path: /nowhere}}]\nkv: {{{kept}, long_prompts: lent}}\n")
    with pytest.raises(CatalogError, match=f"long_prompts.*needs `{needs}: true`"):
        load_catalog(file)


def test_taking_turns_needs_a_place_for_the_kv_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    for keep in ("true", "false"):
        file.write_text(f"models: [{{name: m, path: /nowhere, scheduling: fair}}]\nkv: {{keep: {keep}}}\n")
        if keep == "true":
            (model,) = load_catalog(file).models
            assert model.scheduling is Scheduling.FAIR
    with pytest.raises(CatalogError, match=r"scheduling.*needs `kv.keep: true`"):
        load_catalog(file)
    file.write_text(
        "models: [{name: m, path: /nowhere, scheduling: fair, speculative: {algorithm: ngram}}]\nkv: {keep: true}\n"
    )
    with pytest.raises(CatalogError, match=r"speculative.*does not go with `scheduling: fair`"):
        load_catalog(file)
