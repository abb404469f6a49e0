"""The samples in ``traces/`` are what the commands beside them make."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from prism.cli.trace import command
from prism.trace.files import open_trace

TRACES = Path(__file__).parents[2] / "traces"
ROWS = re.findall(r"^\| `(\S+\.(?:parquet|jsonl))` \|.*$", (TRACES / "README.md").read_text(), re.MULTILINE)


def test_every_sample_is_described() -> None:
    assert sorted(ROWS) == sorted(path.name for path in TRACES.glob("*.*") if path.suffix in (".parquet", ".jsonl"))


@pytest.mark.parametrize("name", ROWS)
def test_the_command_in_the_readme_makes_the_sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = next(line for line in (TRACES / "README.md").read_text().splitlines() if line.startswith(f"| `{name}`"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    for text in re.findall(r"`prism trace ([^`]+)`", line):
        result = CliRunner().invoke(command, shlex.split(text), catch_exceptions=False)
        assert result.exit_code == 0, result.output
    made, kept = open_trace(tmp_path / "traces" / name), open_trace(TRACES / name)
    assert list(made.rows()) == list(kept.rows())
    assert made.info == kept.info


def test_an_empty_trace_is_said(tmp_path: Path) -> None:
    arguments = ["generate", str(tmp_path / "t.jsonl"), "--preset", "hyperbolic", "--duration", "1"]
    result = CliRunner().invoke(command, [*arguments, "--rate-rps", "0.001"], catch_exceptions=False)
    assert "0 requests of 0 models" in result.output and "idle for all of these 1 s" in result.output
