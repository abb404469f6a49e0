"""Whole replays, sender process included, against the null server and against servers that misbehave."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from prism.cli.replay import command
from prism.core.errors import InvalidValue
from prism.trace.replay.calibrate import CalibrationFailed, calibrate
from prism.trace.replay.child import SenderFailed
from prism.trace.replay.output import RecordWriter, finished_rows, read_records, read_segments
from prism.trace.replay.plan import Objective, SendPlan, read_objectives
from prism.trace.replay.planning import ReplayOptions, make_plan
from prism.trace.replay.probe import ProbeFailed
from prism.trace.replay.run import run_replay
from prism.trace.replay.watch import TimelineBuilder
from prism.trace.report import RequestRecord, read_report
from tests.patience import PATIENCE_S
from tests.trace.helpers import row, saved, steady


@pytest.fixture(scope="module")
def null_server() -> Iterator[str]:
    command_line = [sys.executable, "-m", "prism.trace.null_server", "--ttft-ms", "30", "--tpot-ms", "5"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def plan_for(tmp_path: Path, url: str, count: int = 40, **options: Any) -> SendPlan:
    trace = saved(tmp_path / "t.parquet", steady(count, gap_s=0.02))
    return make_plan(ReplayOptions(trace=trace, url=url, **options))


def test_every_request_is_sent_and_measured(tmp_path: Path, null_server: str) -> None:
    plan = plan_for(tmp_path, null_server, default_objective=Objective(PATIENCE_S, PATIENCE_S))
    seen: list[dict[str, Any]] = []
    outcome = run_replay(plan, tmp_path / "out", title="test", on_progress=seen.append)
    records = sorted(read_records(tmp_path / "out" / "records.jsonl"), key=lambda r: r.row)
    assert [r.row for r in records] == list(range(40))
    for record, wanted in zip(records, steady(40, gap_s=0.02), strict=True):
        assert (record.model, record.prompt_tokens, record.output_tokens) == (
            wanted.model,
            wanted.prompt_tokens,
            wanted.output_tokens,
        )
        assert record.server_prompt_tokens == wanted.prompt_tokens
        assert record.arrival_s == pytest.approx(wanted.arrival_s)
        assert record.lag_s >= 0
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.03
        assert record.tpot_s is not None
        assert record.e2e_s == pytest.approx(record.ttft_s + record.tpot_s * (record.output_tokens - 1))
        assert sum(record.gaps.values()) == record.output_tokens - 1
    assert outcome.report.all.attainment.both == 1.0
    assert outcome.report == read_report(tmp_path / "out" / "report.json")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert seen[-1]["ended"] == 40


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_server_counts_the_traces_prompt_lengths(tmp_path: Path, null_server: str, endpoint: str) -> None:
    """A chat template costs a token here; calibration makes up for it."""
    plan = plan_for(tmp_path, null_server, endpoint=endpoint, count=10)
    assert plan.prompts["m0"].fixed == (1.0 if endpoint == "chat" else 0.0)
    run_replay(plan, tmp_path / "out", title="test")
    for record in read_records(tmp_path / "out" / "records.jsonl"):
        assert record.server_prompt_tokens == record.prompt_tokens


def test_a_killed_replay_goes_on_where_it_was(tmp_path: Path, null_server: str) -> None:
    plan = plan_for(tmp_path, null_server)
    run_replay(plan, tmp_path / "out", title="test")
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = sorted(msgspec.json.decode(line)["row"] for line in lines[2:27])
    path.write_bytes(b"".join(lines[:27]) + lines[27][:20])  # killed in the middle of a line
    assert sorted(finished_rows(path, plan)) == kept
    outcome = run_replay(plan, tmp_path / "out", title="test")
    assert sorted(r.row for r in read_records(path)) == list(range(40))
    assert [s.skipped for s in read_segments(path)] == [0, 25]
    assert any("resumed" in note for note in outcome.report.notes)
    arrivals = {r.row: r.arrival_s for r in read_records(path)}
    assert all(arrivals[i] == pytest.approx(i * 0.02, abs=1e-6) for i in range(40))


def test_resuming_other_settings_is_refused(tmp_path: Path, null_server: str) -> None:
    plan = plan_for(tmp_path, null_server, count=5)
    run_replay(plan, tmp_path / "out", title="test")
    other = msgspec.structs.replace(plan, seed=9)
    with pytest.raises(SenderFailed, match="other settings"):
        run_replay(other, tmp_path / "out", title="test")


def test_cancelled_requests_are_sent_again(tmp_path: Path) -> None:
    plan = SendPlan(
        trace="t", trace_sha256="", steps=[], block_tokens=1, url="http://x", endpoint="chat", models={}, prompts={},
        objectives={},
    )  # fmt: skip
    writer = RecordWriter(tmp_path / "r.jsonl", plan)
    for index, error in enumerate(("", "cancelled", "http_500")):
        writer.add(RequestRecord(row=index, model="a", arrival_s=0.0, prompt_tokens=1, output_tokens=0, error=error))
    writer.close()
    assert finished_rows(tmp_path / "r.jsonl", plan) == {0, 2}


# --- servers that misbehave -----------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """Answers by the model's name."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        event = b'data: {"choices":[{"text":" w","finish_reason":null}]}\n\n'
        answers = {
            "refuse": (429, b'{"error":{"message":"queue full"}}'),
            "break": (200, event + b'data: {"error":{"message":"engine died"}}\n\n'),
            "stop": (200, event),
            "nothing": (200, b"data: [DONE]\n\n"),
        }
        status, answer = answers[body["model"]]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_errors_by_kind(tmp_path: Path, scripted: str) -> None:
    kinds = {"refuse": "http_429", "break": "server", "stop": "truncated", "nothing": "empty"}
    trace = saved(tmp_path / "t.parquet", [row(0.0, name) for name in kinds])
    plan = make_plan(ReplayOptions(trace=trace, url=scripted, probe=False, default_objective=Objective(9.0, 9.0)))
    outcome = run_replay(plan, tmp_path / "out", title="test")
    for record in read_records(tmp_path / "out" / "records.jsonl"):
        assert record.error == kinds[record.model]
    assert outcome.report.all.errors == dict.fromkeys(sorted(kinds.values()), 1)
    assert outcome.report.all.attainment.ttft == 0.0
    assert "queue full" in (tmp_path / "out" / "records.jsonl").read_text()


def test_timeouts(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "prism.trace.null_server", "--ttft-ms", "60000"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        plan = plan_for(tmp_path, url, count=3, probe=False, timeout_s=0.2)
        outcome = run_replay(plan, tmp_path / "out", title="test")
        process.terminate()
    assert outcome.report.all.errors == {"timeout": 3}


def test_no_server_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match="no OpenAI-compatible server"):
        plan_for(tmp_path, "http://127.0.0.1:1")


def test_a_trace_without_names_or_lengths_is_refused(tmp_path: Path, null_server: str) -> None:
    unnamed = saved(tmp_path / "u.parquet", [row(0.0, "")])
    with pytest.raises(InvalidValue, match="--onto"):
        make_plan(ReplayOptions(trace=unnamed, url=null_server, probe=False))
    plan = make_plan(ReplayOptions(trace=unnamed, url=null_server, probe=False, onto=["x"]))
    assert plan.models == {"x": "x"}
    bare = saved(tmp_path / "l.parquet", [row(0.0, prompt=None)])
    plan = make_plan(ReplayOptions(trace=bare, url=null_server, probe=False))
    with pytest.raises(SenderFailed, match="has no lengths"):
        run_replay(plan, tmp_path / "out", title="test")


# --- calibration, watching, command line ----------------------------------------------------------------------------


def test_calibration_takes_the_p95s_of_each_model_alone(tmp_path: Path, null_server: str) -> None:
    plan = plan_for(tmp_path, null_server, count=30)
    found = calibrate(plan, tmp_path / "c", limit=8, api_key=None)
    assert set(found) == {"m0", "m1"}
    for objective in found.values():
        assert objective.ttft_s is not None
        assert 0.03 <= objective.ttft_s < 0.5
        assert objective.tpot_s is not None
        assert 0.003 <= objective.tpot_s < 0.1
    assert read_objectives(tmp_path / "c" / "slo.json") == found
    assert read_report(tmp_path / "c" / "m0" / "report.json").all.attainment.requests == 8


def test_calibration_refuses_failures(tmp_path: Path, scripted: str) -> None:
    trace = saved(tmp_path / "t.parquet", [row(0.0, "refuse")])
    plan = make_plan(ReplayOptions(trace=trace, url=scripted, probe=False))
    with pytest.raises((CalibrationFailed, ProbeFailed), match="refuse"):
        calibrate(plan, tmp_path / "c", limit=None, api_key=None)


def replica(state: str, device: str = "host:0") -> dict[str, Any]:
    return {"devices": [device], "state": state, "waiting": 2, "reason": {"code": "request"}}


def test_timeline_of_admin_answers() -> None:
    builder = TimelineBuilder()
    devices = [{"id": "host:0", "capacity_bytes": 100, "weight_bytes": 30, "kv_bytes": 20}]
    for t_s, replicas in enumerate(([], [replica("loading")], [replica("ready")], [replica("ready")], [])):
        model = {"name": "a", "waiting": t_s, "running": 1, "kv_bytes": 7, "replicas": replicas}
        builder.add(float(t_s), [model], devices)
    timeline = builder.build()
    (stay,) = timeline.residences
    assert (stay.model, stay.device, stay.start_s, stay.ready_s, stay.end_s) == ("a", "host:0", 1.0, 2.0, 4.0)
    assert stay.reason == "request"
    assert timeline.device_bytes == {"host:0": 100}
    assert [s.queued["a"] for s in timeline.samples] == [0, 1, 2, 3, 4]
    assert timeline.samples[2].mapped_bytes == {"host:0": 50}
    assert timeline.samples[2].device_queued == {"host:0": 2}


def test_command_line(tmp_path: Path, null_server: str) -> None:
    trace = saved(tmp_path / "t.jsonl", steady(20, gap_s=0.01))
    out = tmp_path / "out"
    arguments = [
        str(trace),
        "--url",
        null_server,
        "--out",
        str(out),
        "--slo-ttft",
        str(PATIENCE_S),
        "--slo-tpot",
        str(PATIENCE_S),
        "--no-watch",
    ]
    result = CliRunner().invoke(command, [*arguments, "--json", "--rate", "2"])
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(result.stdout)
    assert report["all"]["attainment"] == {"requests": 40, "ttft": 1.0, "tpot": 1.0, "both": 1.0}
    assert report["settings"]["plan"]["steps"] == [{"step": "rate", "factor": 2.0, "seed": 0}]
    assert "machine" in report["settings"]
    again = CliRunner().invoke(command, arguments)
    assert isinstance(again.exception, InvalidValue)
    assert "--resume" in str(again.exception)
    resumed = CliRunner().invoke(command, ["--resume", *arguments, "--rate", "2"])
    assert resumed.exit_code == 0, resumed.output
    assert "resumed" in resumed.output
