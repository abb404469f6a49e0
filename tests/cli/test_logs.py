"""Reading logs: merged in order of time, filtered, half lines and rotation survived."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from prism.cli.logs import Filter, Tail
from prism.config.state import StateDir

Run = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir.at(tmp_path)
    made.create()
    return made


def write(state: StateDir, name: str, *lines: dict[str, Any]) -> None:
    with (state.logs / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def line(second: int, **fields: Any) -> dict[str, Any]:
    return {"ts": f"2026-01-01T00:00:{second:02d}.000Z", "level": "info", "process": "p", "msg": f"m{second}", **fields}


def test_merged_in_order(state: StateDir, prism: Run) -> None:
    write(state, "front-0.jsonl", line(1), line(4, level="error", error="E: x", traceback="Traceback..."))
    write(state, "node.jsonl", line(2), line(3, request_id="abc", model="a"))
    write(state, "decisions.jsonl", {"at_s": 1.0, "do": "Activate"})
    shown = prism("logs", "--state-dir", str(state.root)).output
    assert [part for part in shown.split() if part[:1] == "m" and part[1:].isdigit()] == ["m1", "m2", "m3", "m4"]
    assert "Traceback..." in shown and "Activate" not in shown
    newest = prism("logs", "-n", "2", "--json", "--state-dir", str(state.root)).output.splitlines()
    assert [json.loads(text)["msg"] for text in newest] == ["m3", "m4"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--request", "ab"], ["m3"]),
        (["--model", "a"], ["m3"]),
        (["--level", "warning"], ["m4"]),
        (["--process", "nothing"], []),
    ],
)
def test_filters(state: StateDir, prism: Run, options: list[str], expected: list[str]) -> None:
    write(state, "x.jsonl", line(1), line(3, request_id="abc", model="a"), line(4, level="error"))
    shown = prism("logs", "--json", "--state-dir", str(state.root), *options).output.splitlines()
    assert [json.loads(text)["msg"] for text in shown] == expected


def test_decisions(state: StateDir, prism: Run) -> None:
    record = {
        "at_s": 1.5,
        "do": "Activate",
        "model": "a",
        "devices": ["d0", "d1"],
        "reason": {"code": "demand", "waiting": 3},
    }
    write(state, "decisions-local.jsonl", record)
    shown = prism("logs", "--decisions", "--state-dir", str(state.root)).output
    assert "Activate model=a devices=d0,d1: demand (waiting=3)" in shown


def test_no_logs(tmp_path: Path, prism: Run) -> None:
    shown = prism("logs", "--state-dir", str(tmp_path))
    assert shown.exit_code == 1
    assert "there are no logs" in shown.output


def test_following(state: StateDir) -> None:
    write(state, "x.jsonl", line(1))
    tail = Tail(state.logs, decisions=False, wanted=Filter())
    assert [entry["msg"] for entry in tail.newest(10)] == ["m1"]
    assert tail.fresh() == []
    write(state, "x.jsonl", line(2))
    write(state, "y.jsonl", line(3))
    with (state.logs / "x.jsonl").open("a") as file:
        file.write('{"half')
    assert [entry["msg"] for entry in tail.fresh()] == ["m2", "m3"]
    with (state.logs / "x.jsonl").open("a") as file:
        file.write('": 1}\nnonsense\n')
    assert tail.fresh() == [{"half": 1}]
    (state.logs / "x.jsonl").unlink()
    write(state, "x.jsonl", line(5))
    assert [entry["msg"] for entry in tail.fresh()] == ["m5"], "rotated"


def test_raw_output_of_processes(state: StateDir, prism: Run) -> None:
    (state.logs / "engine-1.log").write_text("one\ntwo\nthree")
    (state.logs / "front-0.out").write_text("Traceback\n")
    shown = prism("logs", "--raw", "--process", "engine", "-n", "2", "--state-dir", str(state.root)).output
    assert shown == "==> engine-1.log <==\ntwo\nthree\n"
    assert "Traceback" in prism("logs", "--raw", "--state-dir", str(state.root)).output
