"""``${env:NAME}``: expanded once, never silently wrong, never shown in an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.config.catalog import load_catalog
from prism.config.env import EnvError, expand_env
from prism.config.errors import CatalogError

NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)


def test_expansion() -> None:
    env = {"A": "x", "B_2": "${env:A}"}
    assert expand_env("a ${env:A} b", env) == "a x b"
    assert expand_env("${env:A}${env:A}", env) == "xx"
    assert expand_env("${env:B_2}", env) == "${env:A}", "a value is not expanded again"
    assert expand_env("$${env:A}", env) == "${env:A}"
    assert expand_env("$A ${A} ${other:A}", env) == "$A ${A} ${other:A}"


@pytest.mark.parametrize("text", ["${env:MISSING}", "${env:}", "${env:A B}", "${env:1}", "${env:A"])
def test_refused(text: str) -> None:
    with pytest.raises(EnvError):
        expand_env(text, {"A": "x"})


@given(st.text(max_size=30), st.dictionaries(NAMES, st.text(max_size=5), max_size=3))
def test_any_text_is_expanded_or_refused(text: str, env: dict[str, str]) -> None:
    try:
        expanded = expand_env(text, env)
    except EnvError:
        return
    assert "${env:" in text or expanded == text


@given(st.text(max_size=10), NAMES, st.text(max_size=20), st.text(max_size=10))
def test_text_around_a_reference_stays(before: str, name: str, value: str, after: str) -> None:
    before = before.replace("$", "").replace("{", "")
    after = after.replace("$", "")
    assert expand_env(f"{before}${{env:{name}}}{after}", {name: value}) == before + value + after


def test_unquoted_references_take_yaml_types(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text('models: [{name: "${env:N}", path: m}]\nserver:\n  port: ${env:PORT}\n')
    catalog = load_catalog(file, {"PORT": "81", "N": "17"})
    assert catalog.server.port == 81
    assert catalog.models[0].name == "17", "a quoted reference is text"


def test_secrets_are_not_shown_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: [{name: a, path: b}]\nkeys:\n  - name: k\n    key: ${env:SECRET}\n")
    with pytest.raises(CatalogError) as caught:
        load_catalog(file, {"SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "${env:SECRET}" in str(caught.value)
