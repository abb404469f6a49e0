"""Where recorded traces are looked for, and that a comparison says which ones it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slo import fleet
from benchmarks.slo.compare import main
from benchmarks.slo.fleet import base_trace, trace_source
from benchmarks.slo.spec import Setup
from benchmarks.trace import originals
from prism.core.errors import InvalidValue
from prism.trace.schema import TraceInfo
from tests.trace.helpers import saved, steady


@pytest.fixture
def nothing_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout without recorded traces, in it or beside it."""
    monkeypatch.setattr(originals, "ROOT", tmp_path / "checkout")
    monkeypatch.delenv(originals.VARIABLE, raising=False)


def test_folders_are_looked_at_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_found: None) -> None:
    name = "a.parquet"
    assert originals.find_original(name) is None
    places = [tmp_path / "shared" / "traces", tmp_path / "checkout" / "traces" / "originals", tmp_path / "given"]
    monkeypatch.setenv(originals.VARIABLE, f"{tmp_path / 'empty'}:{places[2]}")
    for place in places:  # each is looked at before those that were filled so far
        place.mkdir(parents=True)
        (place / name).touch()
        assert originals.find_original(name) == place / name


def test_without_a_recorded_trace_the_generator_is_said_to_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_found: None
) -> None:
    base_trace("arena", Setup(Path("demo-models")), tmp_path)
    assert "no arena_prism_e2e_8m.parquet found; the generator's preset takes its place" in capsys.readouterr().err
    assert trace_source("arena", tmp_path) == "generated (preset arena, seed 0)"


def test_a_given_trace_is_used_and_named(tmp_path: Path, nothing_found: None) -> None:
    file = saved(tmp_path / "mine.parquet", steady(200), TraceInfo({"source": "real.pkl"}))
    setup = Setup(Path("demo-models"), recorded={"arena": file})
    path = base_trace("arena", setup, tmp_path)
    source = trace_source("arena", tmp_path)
    assert source.startswith("recorded (mine.parquet, sha256 ")
    assert setup.facts()["recorded"] == {"arena": "mine.parquet"}
    assert base_trace("arena", setup, tmp_path) == path
    other = saved(tmp_path / "other.parquet", steady(100))
    with pytest.raises(InvalidValue, match="another trace"):
        base_trace("arena", Setup(Path("demo-models"), recorded={"arena": other}), tmp_path)


def test_a_trace_that_the_generator_once_made_is_not_called_recorded() -> None:
    info = TraceInfo({"generator": "prism trace generate", "preset": "arena", "seed": 3, "file": "g.parquet"})
    assert fleet.described(info) == "generated (g.parquet; preset arena, seed 3)"


@pytest.mark.parametrize("item", ["arena", "=f", "arena=/nowhere/f.parquet"])
def test_bad_recorded_options_are_refused(tmp_path: Path, item: str) -> None:
    with pytest.raises(InvalidValue, match="NAME=FILE"):
        main(["--out", str(tmp_path), "--recorded", item])
