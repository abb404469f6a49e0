"""The verbs of ``prism sim`` on files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from prism.cli.sim import command
from prism.trace.files import write_trace
from prism.trace.report import read_report
from prism.trace.schema import TraceInfo
from tests.sim.helpers import random_rows
from tests.sim.test_world import EXAMPLES, snapshot

CATALOG = EXAMPLES / "catalog-8.yaml"


def call(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, random_rows([f"model-{i}" for i in range(8)], 1, 60, 30.0), TraceInfo())
    return [trace, "--cluster", EXAMPLES / "cluster-2xh100.yaml", "--catalog", CATALOG]


def test_run_writes_report_page_and_decisions(files: list[object], tmp_path: Path) -> None:
    out, log = tmp_path / "run.json", tmp_path / "decisions.jsonl"
    found = call(*files, "--out", out, "--decisions", log)
    assert found.exit_code == 0, found.output
    assert "60" in found.stdout
    report = read_report(out)
    assert report.kind == "sim"
    assert report.all.attainment.requests == 60
    assert report.timeline.samples
    assert report.settings["seed"] == 0
    assert "<html" in out.with_suffix(".html").read_text("utf-8")
    first = log.read_bytes()
    assert all(json.loads(line)["do"] for line in first.splitlines())
    assert call(*files, "--decisions", log).exit_code == 0
    assert log.read_bytes() == first


def test_json_is_the_report_and_slow_agrees(files: list[object]) -> None:
    fast = json.loads(call(*files, "--json", "--policy", "muxserve").stdout)
    slow = json.loads(call(*files, "--json", "--policy", "muxserve", "--slow").stdout)
    assert fast["all"]["attainment"] == slow["all"]["attainment"]
    assert fast["all"]["ttft_s"]["mean"] == pytest.approx(slow["all"]["ttft_s"]["mean"], rel=1e-9)


def test_sweep_capacity_and_gpus(files: list[object]) -> None:
    points = json.loads(call("sweep", *files, "--policies", "prism,qlm", "--processes", 1, "--json").stdout)
    assert [p["policy"] for p in points] == ["prism", "qlm"]
    found = json.loads(call("capacity", *files, "--target", 0.5, "--json").stdout)
    assert found["gpus"] >= 1
    assert "B200" in call("gpus").stdout


def test_dry_run_of_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    text = msgspec.json.encode(snapshot()).decode().replace('"m0"', '"model-0"').replace('"m1"', '"model-1"')
    path.write_text(text)
    for verb in ("dry-run", "--dry-run"):
        found = call(verb, path, "--catalog", CATALOG, "--policy", "prism", "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["actions"][0]["model"] == "model-1"


def test_mistakes_name_the_key(files: list[object]) -> None:
    found = call(*files, "--rate", -1)
    assert found.exit_code != 0
    assert "rate" in str(found.exception)
    found = call("sweep", *files, "--gpus", "two")
    assert "gpus" in str(found.exception)
