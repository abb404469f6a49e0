"""The shipped schema is the generated one, and the documented example has every key of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from prism.config.catalog import load_catalog
from prism.config.schema import catalog_schema, shipped_schema
from prism.config.sections.machine import EngineConfig, VirtualDevices
from prism.config.sections.server import LogConfig, ServerConfig
from prism.core.settings import PolicySettings

EXAMPLES = Path(__file__).parents[2] / "examples"
ENV = {"PRISM_ADMIN_KEY": "an-admin-key", "TEAM_A_KEY": "a-team-key", "PRISM_API_KEY": "an-api-key"}


def test_the_shipped_schema_is_up_to_date() -> None:
    assert shipped_schema() == catalog_schema(), "run scripts/make_docs.py"


def test_it_is_a_schema_with_descriptions() -> None:
    schema = catalog_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, kind in {"catalog": schema, **schema["$defs"]}.items():
        for key, rule in kind.get("properties", {}).items():
            assert rule.get("description"), f"{name}.{key} has no description"


@pytest.mark.parametrize("name", ["quickstart.yaml", "gpu.yaml", "reference.yaml", "adapters.yaml"])
def test_examples_fit_schema_and_loader(name: str) -> None:
    load_catalog(EXAMPLES / name, ENV)
    jsonschema.validate(yaml.safe_load((EXAMPLES / name).read_text()), shipped_schema())


def test_the_reference_has_every_key() -> None:
    text = (EXAMPLES / "reference.yaml").read_text()
    schema = catalog_schema()
    for kind in (schema, *schema["$defs"].values()):
        for key in kind.get("properties", {}):
            assert f"{key}:" in text, f"examples/reference.yaml does not mention {key}"


def test_the_reference_shows_the_defaults() -> None:
    catalog = load_catalog(EXAMPLES / "reference.yaml", ENV)
    assert catalog.server == ServerConfig()
    assert catalog.engines == EngineConfig()
    assert catalog.log == LogConfig()
    assert catalog.virtual == VirtualDevices()
    assert catalog.policy.settings() == PolicySettings()
    written = yaml.safe_load((EXAMPLES / "reference.yaml").read_text())["defaults"]
    options: dict[str, Any] = catalog_schema()["$defs"]["ModelOptions"]["properties"]
    assert set(written) == set(options)
    for key, rule in options.items():
        assert key in ("slo", "min_kv_memory") or written[key] == rule["default"], key


def test_every_default_is_valid() -> None:
    validator = jsonschema.Draft202012Validator(catalog_schema())
    for kind in catalog_schema()["$defs"].values():
        for key, rule in kind.get("properties", {}).items():
            if "default" in rule:
                assert not list(
                    validator.evolve(schema={**rule, "$defs": catalog_schema()["$defs"]}).iter_errors(rule["default"])
                ), key
