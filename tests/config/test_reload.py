"""What a reload changes, and what it says needs a restart."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.config.catalog import Catalog, load_catalog
from prism.config.reload import CatalogDiff, diff

BASE = """
models:
  - {name: a, path: m/a}
  - {name: b, path: m/b}
server: {port: 8000, max_queue: 10}
"""


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    def build(text: str) -> Catalog:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return load_catalog(file)

    return build


def test_nothing_changed(load) -> None:  # type: ignore[no-untyped-def]
    found = diff(load(BASE), load(BASE + "\n# a comment\n"))
    assert found.empty
    assert found == CatalogDiff()
    assert found.summary() == "nothing to apply"


def test_models(load) -> None:  # type: ignore[no-untyped-def]
    new = BASE.replace("{name: a, path: m/a}", "{name: c, path: m/c}").replace(
        "path: m/b}", "path: m/b, slo: {ttft: 9s}}"
    )
    found = diff(load(BASE), load(new))
    assert [model.name for model in found.added] == ["c"]
    assert [model.name for model in found.removed] == ["a"]
    (change,) = found.changed
    assert (change.new.name, change.keys, change.reactivate) == ("b", ("slo",), False)
    assert found.needs_restart == ()


def test_a_new_path_needs_another_activation(load) -> None:  # type: ignore[no-untyped-def]
    (change,) = diff(load(BASE), load(BASE.replace("path: m/b", "path: m/bb"))).changed
    assert change.reactivate


def test_defaults_reach_the_models(load) -> None:  # type: ignore[no-untyped-def]
    found = diff(load(BASE), load(BASE + "defaults: {late: reject}\n"))
    assert [change.new.name for change in found.changed] == ["a", "b"]


@pytest.mark.parametrize(
    ("more", "restart"),
    [
        ("devices: [cuda:0]", ("devices",)),
        ("virtual: {count: 3}", ("virtual",)),
        ("engines: {threads: 2}", ("engines",)),
        ("policy: {name: qlm}", ("policy.name",)),
        ("log: {backups: 9, level: debug}", ("log.level", "log.backups")),
        ("policy: {tau: 3}", ("policy.tau",)),
    ],
)
def test_what_needs_a_restart_says_so(load, more: str, restart: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    found = diff(load(BASE), load(BASE + more))
    assert found.needs_restart == restart
    assert restart[0] in found.summary()
    assert not found.empty


def test_settings(load) -> None:  # type: ignore[no-untyped-def]
    new = BASE.replace("max_queue: 10", "max_body: 20MiB").replace("8000", "9000")
    found = diff(load(BASE), load(new + "keys: [{name: k, key: '12345678'}]\n"))
    assert found.server == ("server.max_body_bytes",)
    assert found.keys_changed
    assert found.needs_restart == ("server.port", "server.max_queue")


MODELS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.fixed_dictionaries(
        {"path": st.sampled_from(["x", "y"])},
        optional={
            "late": st.sampled_from(["serve", "reject"]),
            "tp": st.integers(1, 3),
            "slo": st.fixed_dictionaries({"ttft": st.sampled_from(["1s", "2s"])}),
            "pin": st.booleans(),
        },
    ),
    min_size=1,
)


def catalog_of(models: dict[str, dict[str, Any]], file: Path) -> Catalog:
    file.write_text(json.dumps({"models": [{"name": name, **options} for name, options in models.items()]}))
    return load_catalog(file)


@settings(deadline=None)
@given(MODELS, MODELS)
def test_a_diff_accounts_for_every_model(old_models: dict[str, Any], new_models: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        old = catalog_of(old_models, Path(folder) / "old.yaml")
        new = catalog_of(new_models, Path(folder) / "new.yaml")
    found = diff(old, new)
    assert found.empty == ({m.name: m for m in old.models} == {m.name: m for m in new.models})
    assert {m.name for m in old.models} - {m.name for m in found.removed} | {m.name for m in found.added} == set(
        new_models
    )
    changed = {change.new.name: change for change in found.changed}
    for name in set(old_models) & set(new_models):
        before, after = old.model(name), new.model(name)
        assert (name in changed) == (before != after)
        if name in changed:
            assert all(getattr(before, key) != getattr(after, key) for key in changed[name].keys)
            assert changed[name].reactivate == (before.path != after.path or before.tp != after.tp)
