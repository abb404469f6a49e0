"""What a machine makes of the catalog's shares."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism.config.catalog import load_catalog
from prism.supervisor.fleet import settings_of

MODELS = [{"name": "m", "path": "/m"}]


def test_kept_kv_leaves_a_small_shared_memory_to_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        json.dumps({"models": MODELS, "kv": {"leave": "500ms", "lend_rate_fraction": 0.2}})
    )
    kv = settings_of(load_catalog(tmp_path / "c.yaml")).kv
    assert kv.host_memory_fraction == 0.1, "on by default"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=64 << 8, f_frsize=4096))
    found = kv.on_this_machine()
    assert 0 < found.host_bytes <= (64 << 20) // 5
    assert (found.leave_s, found.lend_rate_fraction, found.lend_keep_fraction) == (0.5, 0.2, None)
    (tmp_path / "off.yaml").write_text(json.dumps({"models": MODELS, "kv": {"keep": False}}))
    assert settings_of(load_catalog(tmp_path / "off.yaml")).kv.on_this_machine().host_bytes == 0


@pytest.mark.parametrize(("catalog", "lends"), [({}, True), ({"live_scaling": {"mode": "whole"}}, False)])
def test_devices_lend_for_layers_where_any_model_may_begin_early(
    tmp_path: Path, catalog: dict[str, object], lends: bool
) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps({"models": MODELS, **catalog}))
    assert (settings_of(load_catalog(tmp_path / "c.yaml")).layers_keep_fraction is not None) is lends
    own = [{**MODELS[0], "live_scaling": "pair"}]
    (tmp_path / "own.yaml").write_text(json.dumps({**catalog, "models": own}))
    (spec,) = load_catalog(tmp_path / "own.yaml").models
    assert spec.live_scaling == "pair"
    assert settings_of(load_catalog(tmp_path / "own.yaml")).layers_keep_fraction is not None
