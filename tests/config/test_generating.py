"""Engine arguments with which a model could answer nothing are refused before an engine dies of its first request."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.config.catalog import load_catalog
from prism.config.errors import CatalogError

CATALOG = "devices: [{{id: 'host:0', memory: 1GiB}}]\nmodels: [{{name: m, path: x, engine_args: {{{args}}}}}]\n"


def load(tmp_path: Path, args: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(CATALOG.format(args=args))
    load_catalog(file)


@pytest.mark.parametrize(
    "args",
    [
        "encoder_only: true",
        "language_only: true",
        "prefill_only_disable_kv_cache: true",
        "disaggregation_mode: prefill",
        "disaggregation_mode: decode",
        "nnodes: 2",
        "node_rank: 1",
    ],
)
def test_an_entry_that_cannot_generate_is_refused(tmp_path: Path, args: str) -> None:
    with pytest.raises(CatalogError) as refused:
        load(tmp_path, args)
    assert f"engine_args.{args.partition(':')[0]}" in str(refused.value)
    assert "is decided by Prism" in str(refused.value)
