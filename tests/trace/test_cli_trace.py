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


def test_a_short_trace_has_all_its_models(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    said = run("generate", path, "--models", 3, "--duration", 60)
    assert len({r.model for r in open_trace(path).rows()}) == 3
    assert "requests of 3 models" in said


def test_models_without_requests_are_named_with_the_reason(tmp_path: Path) -> None:
    arguments = ["generate", str(tmp_path / "g.jsonl"), "--models", "3", "--duration", "60", "--rate-rps", "0.05"]
    said = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    assert "no requests of" in said and "model-2" in said and "--rate-rps" in said


def written(file: Path, times_s: list[float]) -> Path:
    line = {"model": "m", "prompt_tokens": 1, "output_tokens": 1}
    file.write_text("".join(json.dumps({"arrival_s": at_s, **line}) + "\n" for at_s in times_s))
    return file


def test_stats_warn_of_milliseconds(tmp_path: Path) -> None:
    wrong = written(tmp_path / "ms.jsonl", [float(i * 365) for i in range(1700)])
    assert "620" in (said := CliRunner().invoke(command, ["stats", str(wrong)]).output)
    assert "look like milliseconds" in said and "--time 0.001" in said
    right = written(tmp_path / "s.jsonl", [i * 0.365 for i in range(1700)])
    assert "milliseconds" not in CliRunner().invoke(command, ["stats", str(right)]).output
    week = written(tmp_path / "w.jsonl", [float(i // 2) for i in range(30_000)])
    assert "milliseconds" not in CliRunner().invoke(command, ["stats", str(week)]).output


def test_stats_refuse_an_empty_trace(tmp_path: Path) -> None:
    for text in ("", '{"trace": {}}\n'):
        (tmp_path / "e.jsonl").write_text(text)
        refused = CliRunner().invoke(command, ["stats", str(tmp_path / "e.jsonl")])
        assert isinstance(refused.exception, InvalidValue) and "has no requests" in str(refused.exception)
