"""Durations and sizes: what is written is what is meant, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration_s,
    parse_size_bytes,
)
from prism.core.errors import InvalidValue

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers())
)


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("0", 0.0),
        (0, 0.0),
        ("250us", 0.00025),
        ("1d", 86400.0),
    ],
)
def test_durations(text: object, expected_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "text", ["500", 5, 2.5, "ms", "-1s", "1  s", " 1s", "1s 2", "1e3s", "", "1sec", "1s\n", "nan", True, None, "1s-2s"]
)
def test_refused_durations_name_key_value_and_units(text: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_duration_s(text, "slo.ttft")
    assert caught.value.key == "slo.ttft"
    assert caught.value.value is text
    assert "ms" in caught.value.choices


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("80GB", 80 * 10**9),
        ("2 MiB", 2 << 20),
        ("7B", 7),
        ("0", 0),
        (0, 0),
        ("1kB", 1000),
    ],
)
def test_sizes(text: object, expected_bytes: int) -> None:
    assert parse_size_bytes(text) == expected_bytes


@pytest.mark.parametrize("text", ["64", 64, "64Mb", "64mib", "-1MiB", "", "MiB", "1e3MiB", False, None, [], "1MiB "])
def test_refused_sizes(text: object) -> None:
    with pytest.raises(InvalidValue):
        parse_size_bytes(text)


@given(ANYTHING)
def test_anything_is_parsed_or_refused(value: object) -> None:
    for parse in (parse_duration_s, parse_size_bytes):
        with contextlib.suppress(InvalidValue):
            assert parse(value) >= 0


@given(st.integers(0, 10**15))
def test_sizes_survive_being_written(value_bytes: int) -> None:
    assert parse_size_bytes(format_size(value_bytes)) == value_bytes


@given(st.integers(0, 10**13))
def test_durations_survive_being_written(micros: int) -> None:
    value_s = micros / 1e6
    assert parse_duration_s(format_duration(value_s)) == pytest.approx(value_s, abs=1e-9, rel=1e-12)


@given(st.one_of(st.text(max_size=12), st.from_regex(DURATION_PATTERN), st.from_regex(SIZE_PATTERN)))
def test_the_schema_accepts_what_the_parsers_accept(text: str) -> None:
    for pattern, parse in ((DURATION_PATTERN, parse_duration_s), (SIZE_PATTERN, parse_size_bytes)):
        matches = re.search(pattern.replace("$", r"\Z"), text) is not None
        try:
            parse(text)
            parsed = True
        except InvalidValue:
            parsed = False
        assert parsed == matches
