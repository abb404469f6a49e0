"""OLMo-3's positions are those that its checkpoint says, in either form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.olmo3 import keep_turns

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": YARN}, {**YARN, "rope_theta": 5e5}),
        ({"rope_parameters": {**YARN, "rope_theta": 5e5}}, {**YARN, "rope_theta": 5e5}),
    ],
)
def test_the_base_and_its_scaling_are_kept(given: dict[str, Any], turns: dict[str, Any]) -> None:
    def original(config: Any, **rest: Any) -> None:
        assert config.max_position_embeddings == 65536, "Transformers asks for it before SGLang sets it"
        assert "rope_scaling" not in rest and "rope_parameters" not in rest
        config.rope_parameters = None

    config = SimpleNamespace()
    keep_turns(original, config, max_position_embeddings=65536, **given)
    assert config.rope_parameters == turns
