"""SGLang's front side is made for every architecture that an engine may serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.config.catalog import load_catalog
from tests.server.live import import_sglang
from tests.server.tiny import make_model

WINDOWS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 32}


@pytest.mark.parametrize(
    ("architecture", "kind", "more"),
    [
        ("LlamaForCausalLM", "llama", {}),
        ("Exaone4ForCausalLM", "exaone4", {**WINDOWS, "sliding_window_pattern": 4}),
        ("GptOssForCausalLM", "gpt_oss", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_architectures_that_name_their_back_ends(
    tmp_path: Path, architecture: str, kind: str, more: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], "model_type": kind, **more}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "c.yaml").write_text("models: [{name: m, path: m}]")
    catalog = load_catalog(tmp_path / "c.yaml")
    import_sglang()
    from prism.server.sglang_build import ServerArgs, server_args

    made = ServerArgs(**server_args(catalog.model("m"), folder, catalog.base))
    assert made.served_model_name == "m"
