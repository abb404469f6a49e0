"""The verbs of ``prism sim`` on files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from prism.cli.sim import command
from prism.core.errors import InvalidValue
from prism.trace.files import write_trace
from prism.trace.report import read_report
from prism.trace.schema import TraceInfo
from tests.sim.helpers import random_rows
from tests.sim.test_dry_run import snapshot
from tests.sim.test_world import EXAMPLES

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
    options = (path, "--catalog", CATALOG, "--policy", "prism", "--json")
    for words in (("dry-run", *options), ("--dry-run", *options), (*options, "--dry-run")):
        found = call(*words)
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["actions"][0]["model"] == "model-1"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--rate", -1], "rate: must be positive (got -1.0)"),
        (["--slo-scale", 0], "slo-scale: must be positive"),
        (["--limit-s", -5], "limit-s: must be positive"),
        (["--seed", -1], "seed: must not be negative"),
        (["--limit-s", 0.0001], "has no requests in its first 0.0001 s"),
        (["--out", "/dev/null/x.json"], "out: cannot be written"),
        (["--out", "run.html"], "its page is written beside it"),
        (["sweep", "--gpus", "two"], "gpus: must be whole numbers"),
        (["sweep", "--gpus", "2.5"], "gpus: must be whole numbers"),
        (["sweep", "--gpus", "2,0"], "gpus: must be at least 1"),
        (["sweep", "--rates", "1,x"], "rates: must be numbers"),
        (["sweep", "--policies", "prism,best"], "policy: unknown policy (got 'best'); choices: prism, static"),
        (["capacity", "--target", 1.5], "target: must be a share"),
        (["capacity", "--most", 0], "most: must be at least 1"),
    ],
)
def test_mistakes_name_the_key(files: list[object], words: list[object], part: str) -> None:
    verb = [words.pop(0)] if isinstance(words[0], str) and words[0][0] != "-" else []
    found = call(*verb, *files, *words)
    assert found.exit_code != 0
    assert part in str(found.exception)


def test_a_model_that_the_catalog_lacks_is_named_before_the_run(files: list[object], tmp_path: Path) -> None:
    trace = tmp_path / "other.jsonl"
    write_trace(trace, random_rows(["model-1", "model-1b"], 1, 20, 30.0), TraceInfo())
    found = call(trace, *files[1:])
    assert f"{trace} row " in str(found.exception)
    assert "catalog-8.yaml does not have this model (got 'model-1b'); choices: model-1" in str(found.exception)


@pytest.mark.parametrize(
    ("gpu", "model", "part"),
    [
        ("A100", "model-0", "gpu: the cluster has no such GPU (got 'A100'); choices: H100"),
        ("H100", "other", "samples: the catalog has none of these models (got ['other']); choices: model-0"),
    ],
)
def test_a_calibration_that_changes_nothing_is_refused(
    files: list[object], tmp_path: Path, gpu: str, model: str, part: str
) -> None:
    table, sample = tmp_path / "table.json", {"model": model, "kind": "decode", "batch": 1, "seconds": 0.01}
    table.write_text(json.dumps({"gpu": gpu, "machine": "test", "samples": [sample]}))
    found = call(*files, "--calibration", table)
    assert f"{table}: {part}" in str(found.exception)


def test_faults_must_fit_the_number_of_gpus(files: list[object]) -> None:
    words = [EXAMPLES / "cluster-faults.yaml" if word == EXAMPLES / "cluster-2xh100.yaml" else word for word in files]
    found = call("sweep", *words, "--gpus", "2")
    assert "cluster-faults.yaml with 2 GPUs: faults[3].target: no such node is up then" in str(found.exception)


def test_an_error_in_a_process_of_a_sweep_is_told(files: list[object]) -> None:
    """Errors come back whole from other processes, and none leaves the sweep waiting for ever."""
    words = [EXAMPLES / "cluster-faults.yaml" if word == EXAMPLES / "cluster-2xh100.yaml" else word for word in files]
    found = call("sweep", *words, "--gpus", "4,1", "--processes", 2)
    assert isinstance(found.exception, InvalidValue)
    assert "with 1 GPUs" in str(found.exception)


def test_errors_are_told_by_reason(files: list[object], tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(CATALOG.read_text().replace("model-0, path", "model-0, tp: 4, path"))
    found = call(*[catalog if word == CATALOG else word for word in files])
    assert "errors: " in found.stdout
    assert "refused:no_feasible_device" in found.stdout


def test_outputs_go_into_a_new_folder(files: list[object], tmp_path: Path) -> None:
    out, log = tmp_path / "a" / "run.json", tmp_path / "b" / "decisions.jsonl"
    assert call(*files, "--limit-s", 5, "--out", out, "--decisions", log).exit_code == 0
    assert out.is_file()
    assert out.with_suffix(".html").is_file()
    assert log.is_file()


def test_the_decision_log_is_the_same_in_any_process(files: list[object], tmp_path: Path) -> None:
    """Whatever the seed of Python's hashes, by which sets of strings are ordered."""
    logs = []
    for seed in ("1", "2"):
        log = tmp_path / f"{seed}.jsonl"
        words = [*map(str, files), "--decisions", str(log)]
        subprocess.run(
            [sys.executable, "-m", "prism.cli.main", "sim", *words],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        logs.append(log.read_bytes())
    assert logs[0]
    assert logs[0] == logs[1]
