"""``prism trace`` from a public original to statistics."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from prism.cli.trace import command
from prism.core.errors import InvalidValue
from prism.trace.files import open_trace


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_convert_transform_stats(tmp_path: Path) -> None:
    source = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{i:02}.0000000,{i},{i + 1}" for i in range(50)]
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    converted, changed = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    assert "49 requests; left out 1 (no tokens)" in run("convert", "azure2023", source, converted)
    run("transform", converted, changed, "--split", "x,y", "--rate", "3", "--most-prompt", "20", "--window", ":30")
    trace = open_trace(changed)
    assert {r.model for r in trace.rows()} == {"x", "y"}
    assert max(r.prompt_tokens or 0 for r in trace.rows()) == 20
    assert [s["step"] for s in trace.info.provenance["steps"]] == ["window", "lengths", "split", "rate"]
    assert trace.info.provenance["source"] == "azure.csv"
    figure = tmp_path / "f.svg"
    text = run("stats", changed, "--models", "--figure", figure)
    assert "idle intervals per hour" in text
    assert figure.read_text().startswith("<svg")
    stats = json.loads(run("stats", changed, converted, "--json"))
    assert stats["a"]["requests"] == 49
    assert {m["model"] for m in stats["b"]["models"]} == {"x", "y"}


def test_generate(tmp_path: Path) -> None:
    path = tmp_path / "g.parquet"
    run("generate", path, "--preset", "arena", "--seed", 3, "--names", "a,b,c", "--duration", 60, "--sigma", 0.5)
    trace = open_trace(path)
    assert {r.model for r in trace.rows()} <= {"a", "b", "c"}
    assert trace.info.provenance["spec"]["sigma"] == 0.5


def test_errors_name_file_row_and_field(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n")
    result = CliRunner().invoke(command, ["convert", "azure2023", str(bad), str(tmp_path / "o.parquet")])
    assert isinstance(result.exception, InvalidValue)
    for part in ("bad.csv", "row 0", "TIMESTAMP"):
        assert part in str(result.exception)


def test_models_by_name_on_the_command_line(tmp_path: Path) -> None:
    source, changed = tmp_path / "g.jsonl", tmp_path / "c.jsonl"
    run("generate", source, "--names", "a,b,c", "--duration", 60, "--off-level", 0.5, "--level-sigma", 0.1)
    run("transform", source, changed, "--only", "a,b", "--rename", "a=x", "--rename", "b=y")
    assert {r.model for r in open_trace(changed).rows()} <= {"x", "y"}
    bad = CliRunner().invoke(command, ["transform", str(source), str(changed), "--rename", "a"])
    assert isinstance(bad.exception, InvalidValue)
