"""A catalog that cannot be used says why, with file, line, key, value and choices; never with a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prism.config.errors import CatalogError
from prism.config.load import load_text
from prism.config.schema import catalog_schema

OK = "models: [{name: a, path: b}]\n"


def problems(text: str | bytes) -> list[str]:
    """What is wrong with ``text``, as the user reads it."""
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(CatalogError) as caught:
        load_text(data, "c.yaml", {})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("models:\n  - name: a\n    pth: b\n", 3, ["models[0].pth", "not a known key", "path"]),
        ("models:\n  - name: a\n", 2, ["models[0].path", "required"]),
        (OK + "policy:\n  name: prisma\n", 3, ["policy.name", "prisma", "static", "muxserve", "qlm"]),
        (OK + "policy:\n  kvpr: x\n", 3, ["policy.kvpr", "paper", "lookahead"]),
        (OK + "devices: [gpu:0]\n", 2, ["devices[0]", "cuda:N or host:N"]),
        (OK + "devices: 3\n", 2, ["devices", "auto or a list"]),
        (OK + "devices: []\n", 2, ["devices", "empty"]),
        (OK + "devices:\n  - host:0\n", 3, ["devices[0]", "needs `memory`"]),
        (OK + "devices:\n  - {id: host:0, memory: 1B}\n", 3, ["at least 4MiB"]),
        (OK + "devices: [cuda:0, cuda:0]\n", 2, ["twice"]),
        ("models:\n  - {name: a, path: b}\n  - {name: b, path: b, aliases: [a]}\n", 3, ["aliases[0]", "model a"]),
        ("models: []\n", 1, ["models", "empty"]),
        ('models: ["${env:X}"]\n', 1, ["X"]),
        ('devices: ["${env:X}"]\n' + OK, 1, ["X"]),
        ("models: [{name: a, path: b, slo: {ttft: 0s}}]\n", 1, ["slo.ttft", "more than 0"]),
        ("defaults:\n  max_wait: 0\n" + OK, 2, ["defaults.max_wait"]),
        ("models: [{name: a, path: b, engine_args: {tp_size: 2}}]\n", 1, ["engine_args.tp_size", "`tp`"]),
        ("defaults:\n  engine_args: {dtpe: half}\n" + OK, 2, ["defaults.engine_args.dtpe", "choices: dtype"]),
        ("devices: [cuda:0]\nmodels: [{name: a, path: b, tp: 2}]\n", 2, ["tp", "more devices"]),
        (OK + "server: {port: 70000}\n", 2, ["server.port", "at most 65535"]),
        (OK + "server: {port: yes}\n", 2, ["server.port", "whole number"]),
        (OK + "keys: [{name: a, key: short}]\n", 2, ["keys[0].key", "8 characters"]),
        (OK + "keys: [{name: a, key: '12345678', models: [aa]}]\n", 2, ["keys[0].models[0]", "choices: a"]),
        (OK + "keys:\n- {name: a, key: '12345678'}\n- {name: a, key: '12345678'}\n", 4, ["another key"]),
        (OK + "engines: {parked_per_device: 9}\n", 2, ["max_per_device"]),
        (OK + "models: [{name: b, path: c}]\n", 2, ["models", "given twice", "line 1"]),
        ("a: &x [*x]\n" + OK, 1, ["nested too deep"]),
        (OK + "log: !!python/object:os.system {}\n", 2, []),
        ("models: [{name: a\n", 2, ["not valid YAML"]),
        ("{1: 2}\n", 1, ["models", "required"]),
        ("- a\n", 1, ["must be a mapping"]),
        ("", 1, ["is empty"]),
        (OK + "virtual: {count: .inf}\n", 2, ["finite"]),
        (OK + "? [a, b]\n: c\n", 2, ["key that is not text"]),
        (OK + "<<: 3\n", 1, ["cannot be merged"]),
        (OK + "server: {port: 1_0}\nserver2: 2001-01-01\n", 3, ["server2"]),
        ("models: [{name: 'bad name', path: b}]\n", 1, ["not a model name"]),
    ],
)
def test_problems_name_line_and_key(text: str, line: int, parts: list[str]) -> None:
    found = problems(text)
    assert any(f"c.yaml:{line}: " in problem and all(part in problem for part in parts) for problem in found), found


def test_all_problems_are_shown_at_once_in_file_order() -> None:
    found = problems("models:\n  - nam: a\n    path: 3\n    tp: 0\npolicy: {tau: -1}\nzzz: 1\n")
    lines = [int(problem.split(":")[1]) for problem in found]
    assert len(found) >= 5
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"\x00", b"a: \x01", b"\xed\xa0\x80", b"%YAML 9\n---\n", b"a: b: c", b"*x"]
)
def test_bytes_that_are_no_yaml(data: bytes) -> None:
    assert problems(data)


def test_billion_laughs_is_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "too large" in problems("\n".join(lines))[0]


def test_deep_nesting_is_refused() -> None:
    assert problems("a: " + "[" * 5000 + "]" * 5000)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    from prism.config.catalog import load_catalog

    for path in (tmp_path / "none.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(CatalogError, match="cannot be read"):
            load_catalog(path)


KEYS = sorted({key for kind in catalog_schema()["$defs"].values() for key in kind.get("properties", {})})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "cuda:0", "host:1", "1s", "4MiB", "prism", "serve", "${env:X}", "<<", "=", "1:30"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
SECTIONS = st.dictionaries(st.sampled_from(sorted(catalog_schema()["properties"])), VALUES, max_size=5)


def loads_or_explains(data: bytes) -> None:
    try:
        load_text(data, "c.yaml", {"X": "value"})
    except CatalogError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.key
            assert re.match(r"c\.yaml(:\d+)?: ", str(problem))


@settings(max_examples=300, deadline=None)
@given(SECTIONS)
def test_any_tree_loads_or_explains(tree: dict[str, Any]) -> None:
    loads_or_explains(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80) | st.text("a:-[]{}&*!|>'\"\n #%@`<?,0123456789.", max_size=60).map(str.encode))
@example(b"!x")
@example(b"<<")
@example(b"!!int x")
def test_any_bytes_load_or_explain(data: bytes) -> None:
    loads_or_explains(data)


EXAMPLE = (Path(__file__).parents[2] / "examples" / "reference.yaml").read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 40), st.binary(max_size=6))
def test_a_damaged_example_loads_or_explains(at: int, removed: int, inserted: bytes) -> None:
    loads_or_explains(EXAMPLE[:at] + inserted + EXAMPLE[at + removed :])
