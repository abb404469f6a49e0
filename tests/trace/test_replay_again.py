"""Going on with a replay and repeating one; what the notes and the timeline say about it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from prism.cli.replay import command
from prism.core.errors import InvalidValue
from prism.trace.replay.http import HttpPool, Target
from prism.trace.replay.notes import run_notes
from prism.trace.replay.output import read_records
from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.replay.planning import ReplayOptions, make_plan, only_model
from prism.trace.replay.run import run_replay
from prism.trace.replay.watch import TimelineBuilder, joined
from prism.trace.report import RequestRecord, Residence, Sample, Timeline, read_report
from tests.patience import PATIENCE_S, until
from tests.trace.helpers import row, saved, steady
from tests.trace.test_replay import null_server  # noqa: F401  (a fixture)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, null_server: str) -> Path:  # noqa: F811
    """A folder with a trace and with a replay of it that lacks its last ten records."""
    folder = tmp_path_factory.mktemp("first")
    trace, out = saved(folder / "t.jsonl", steady(20, gap_s=0.01)), folder / "out"
    done = invoke(trace, "--url", null_server, "--out", out, "--no-watch", "--seed", 3, "--slo-ttft", 9)
    assert done.exit_code == 0, done.output
    records = out / "records.jsonl"
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:12]))
    return folder


@pytest.fixture
def begun(tmp_path: Path, first: Path) -> tuple[Path, Path]:
    """A trace and the folder of its replay, for one test to change."""
    copy = Path(shutil.copytree(first, tmp_path / "begun"))
    return copy / "t.jsonl", copy / "out"


def test_resuming_needs_only_the_folder(begun: tuple[Path, Path]) -> None:
    """Server and settings are those of the first part."""
    trace, out = begun
    resumed = invoke(trace, "--out", out, "--resume", "--no-watch", "--json")
    assert resumed.exit_code == 0, resumed.output
    report = msgspec.json.decode(resumed.stdout)
    assert report["all"]["attainment"]["requests"] == 20
    assert report["settings"]["plan"]["seed"] == 3


@pytest.mark.parametrize("other", [("--seed", 4), ("--rate", 2), ("--slo-ttft", 8), ("--no-ignore-eos",)])
def test_resuming_with_other_settings_is_refused(begun: tuple[Path, Path], other: tuple[object, ...]) -> None:
    trace, out = begun
    refused = invoke(trace, "--out", out, "--resume", "--no-watch", "--seed", 3, "--slo-ttft", 9, *other)
    assert isinstance(refused.exception, InvalidValue)
    assert "other settings" in str(refused.exception)


def test_resuming_with_another_trace_is_refused(tmp_path: Path, begun: tuple[Path, Path]) -> None:
    other = saved(tmp_path / "other.jsonl", steady(21, gap_s=0.01))
    refused = invoke(other, "--out", begun[1], "--resume")
    assert isinstance(refused.exception, InvalidValue)
    assert "is not the trace of that run" in str(refused.exception)


def test_a_moved_trace_can_be_gone_on_with(tmp_path: Path, begun: tuple[Path, Path]) -> None:
    trace, out = begun
    moved = trace.rename(tmp_path / "moved.jsonl")
    resumed = invoke(moved, "--out", out, "--resume", "--no-watch")
    assert resumed.exit_code == 0, resumed.output


def test_a_report_is_enough_to_repeat_its_run(tmp_path: Path, begun: tuple[Path, Path]) -> None:
    trace, out = begun
    again = tmp_path / "again"
    repeated = invoke(trace, "--repeat", out / "report.json", "--out", again, "--no-watch")
    assert repeated.exit_code == 0, repeated.output
    first, second = (msgspec.json.decode((folder / "plan.json").read_bytes(), type=SendPlan) for folder in (out, again))
    assert first.fingerprint() == second.fingerprint()
    assert len(list(read_records(again / "records.jsonl"))) == 20
    refused = invoke(trace, "--repeat", out / "report.json", "--out", tmp_path / "x", "--rate", 2)
    assert "leave it out: rate" in str(refused.exception)
    bad = invoke(trace, "--repeat", trace, "--out", tmp_path / "y")
    assert isinstance(bad.exception, InvalidValue)


def test_ctrl_c_ends_a_replay_well(tmp_path: Path, null_server: str) -> None:  # noqa: F811
    """What is under way is cancelled and recorded, the report says so, and the rest can be sent later."""
    trace, out = saved(tmp_path / "t.jsonl", [*steady(20, gap_s=0.01), row(5000.0, "m0", 5, 5)]), tmp_path / "out"
    line = [sys.executable, "-m", "prism.cli.main", "replay", str(trace), "--url", null_server, "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it
    try:
        process = subprocess.Popen([*line, "--no-watch"], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        records = out / "records.jsonl"
        try:
            until(lambda: records.exists() and records.read_bytes().count(b"\n") >= 22, "20 requests are answered")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "go on with --resume" in said
    report = read_report(out / "report.json")
    assert report.all.attainment.requests == 20
    assert "The replay was interrupted before its end." in report.notes


@pytest.mark.parametrize("extra", ["{", "[1]"])
def test_bad_extra_fields_are_said(begun: tuple[Path, Path], extra: str) -> None:
    assert "extra" in str(invoke(begun[0], "--extra", extra).exception)


def test_a_calibration_is_not_taken_from_old_records(tmp_path: Path, null_server: str) -> None:  # noqa: F811
    trace, out = saved(tmp_path / "t.jsonl", steady(10, gap_s=0.01, models=1)), tmp_path / "c"
    arguments = (trace, "--url", null_server, "--out", out, "--calibrate")
    assert invoke(*arguments).exit_code == 0
    refused = invoke(*arguments)
    assert isinstance(refused.exception, InvalidValue)
    assert invoke(*arguments, "--resume").exit_code == 0


def test_a_model_alone_does_not_wait_for_its_first_request(tmp_path: Path) -> None:
    trace = saved(tmp_path / "t.parquet", [row(0.0, "a"), row(70.0, "b"), row(71.5, "b")])
    plan = make_plan(ReplayOptions(trace=trace, url="http://x", probe=False))
    alone = only_model(plan, "b", None, 70.0)
    assert alone.steps[-1] == {"step": "window", "start_s": 70.0}


# --- notes, timelines, connections ----------------------------------------------------------------------------------


def plan_of(objectives: dict[str, Objective]) -> SendPlan:
    return SendPlan(
        trace="t", trace_sha256="", steps=[], block_tokens=1, url="http://x", endpoint="chat",
        models={"a": "a", "b": "b"}, prompts={}, objectives=objectives,
    )  # fmt: skip


def test_defaults_fill_what_a_model_s_objective_leaves_open(tmp_path: Path) -> None:
    trace = saved(tmp_path / "t.parquet", [row(0.0, "a"), row(1.0, "b")])
    plan = make_plan(
        ReplayOptions(
            trace=trace, url="http://x", probe=False, objectives={"a": Objective(None, 0.1)},
            default_objective=Objective(2.0, 0.2), slo_scale=2.0,
        )
    )  # fmt: skip
    assert plan.objectives == {"a": Objective(4.0, 0.2), "b": Objective(4.0, 0.4)}


def test_models_without_objectives_are_said() -> None:
    both = {"a": Objective(1.0, 1.0), "b": Objective(1.0)}
    assert run_notes(plan_of(both), [], 1, False) == []
    (note,) = run_notes(plan_of({"a": Objective(1.0)}), [], 1, False)
    assert note.startswith("b: these models have no objective")
    (note,) = run_notes(plan_of({}), [], 1, False)
    assert note.startswith("The models have no objective")


def test_answers_of_another_length_are_said() -> None:
    records = [
        RequestRecord(row=0, model="a", arrival_s=0.0, prompt_tokens=1, output_tokens=3, asked_tokens=9),
        RequestRecord(
            row=1, model="a", arrival_s=0.0, prompt_tokens=1, output_tokens=0, asked_tokens=9, error="timeout"
        ),
        RequestRecord(row=2, model="a", arrival_s=0.0, prompt_tokens=1, output_tokens=9),
    ]
    notes = run_notes(plan_of({"a": Objective(1.0), "b": Objective(1.0)}), records, 1, False)
    assert notes == ["1 complete answers had another number of tokens than the trace (3 instead of 9 in all)."]


def test_the_servers_own_times_are_used_between_looks() -> None:
    builder = TimelineBuilder(zero_unix_s=1000.0)

    def look(t_s: float, *replicas: tuple[int, str, float]) -> None:
        shown = [{"devices": ["d"], "generation": g, "state": s, "since_s": since} for g, s, since in replicas]
        builder.add(t_s, [{"name": "a", "replicas": shown}], [])

    look(0.0)
    look(1.0, (1, "loading", 1000.3))
    look(2.0, (1, "ready", 1001.1))
    look(3.0, (2, "ready", 1002.6))  # gone and back between two looks
    look(4.0, (2, "ready", 1002.6))
    stays = [(s.start_s, s.ready_s, s.end_s) for s in builder.build().residences]
    assert stays == [(pytest.approx(0.3), pytest.approx(1.1), 3.0), (pytest.approx(2.6), pytest.approx(2.6), None)]


def test_a_resumed_replay_keeps_what_was_seen_before() -> None:
    def part(*times_s: float) -> Timeline:
        samples = [Sample(t_s=t_s) for t_s in times_s]
        return Timeline(samples=samples, residences=[Residence(model="a", device="d", start_s=times_s[0])])

    whole = joined(part(0.0, 1.0), part(1.5, 2.5))
    assert [s.t_s for s in whole.samples] == [0.0, 1.0, 1.5, 2.5]
    assert [(s.start_s, s.end_s) for s in whole.residences] == [(0.0, 1.0), (1.5, None)]
    assert joined(None, part(1.0)) == joined(Timeline(), part(1.0)) == part(1.0)


def test_a_request_whose_connection_does_not_open_can_be_given_up() -> None:
    """As on a host that drops packets."""
    heard: list[tuple[str, str]] = []

    class Heard:
        def on_status(self, status: int) -> None: ...
        def on_body(self, piece: bytes) -> None: ...
        def on_end(self) -> None: ...
        def on_failure(self, kind: str, detail: str) -> None:
            heard.append((kind, detail))

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def drive() -> None:
        pool, exchange = HttpPool(Target.of("http://127.0.0.1:9"), 4), Heard()
        asyncio.get_running_loop().create_connection = never  # type: ignore[method-assign,assignment]
        pool.send(b"", exchange)
        await asyncio.sleep(0)
        pool.cancel(exchange, "timeout", "too long")
        for _ in range(5):
            await asyncio.sleep(0)
        pool.close()

    asyncio.run(drive())
    assert heard == [("timeout", "too long")]


def test_run_with_nothing_left_to_send_keeps_its_report(begun: tuple[Path, Path], null_server: str) -> None:  # noqa: F811
    out = begun[1]
    plan = msgspec.json.decode((out / "plan.json").read_bytes(), type=SendPlan)
    assert run_replay(plan, out, title="t").report.all.attainment.requests == 20
    assert run_replay(plan, out, title="t").report.all.attainment.requests == 20
