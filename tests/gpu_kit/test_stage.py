"""Stages: an item that hangs, dies or is wrong ends alone, and a stage that was killed goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import stage
from scripts.gpu.stage import ROOT, run_stage
from tests.gpu_kit.stand_ins import STAGE
from tests.patience import PATIENCE_S, until


def arguments(folder: Path, *items: str) -> list[str]:
    return ["--out", str(folder / "out"), "--scratch", str(folder), "--only", *items]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "stand_ins.json").read_text())["items"]
    return found


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_stage(STAGE, arguments(tmp_path, "good", "slow", "wrong", "dies"))
    assert code == 1
    found = results(tmp_path)
    assert {name: item["verdict"] for name, item in found.items()} == {
        "good": "ok",
        "slow": "slow",
        "wrong": "wrong",
        "dies": "wrong",
    }
    assert found["wrong"]["finding"]["faults"] == ["ValueError: two and two are five"]
    assert "died by SIGSEGV" in found["dies"]["finding"]["faults"][0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "good"],
        ["slow", "slow"],
        ["wrong", "wrong"],
        ["wrong", "dies"],
    ]
    assert "time 200 us (goal 100 [est])" in lines[1]


def test_a_hanging_item_is_ended_with_its_children_and_keeps_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = stage._await

    def until_it_hangs(process: subprocess.Popen[bytes], limit_s: float) -> str:
        """Its limit counts from there: how long a start takes is the machine's affair."""
        until(lambda: (tmp_path / "child").exists(), "the item's hanging")
        return wait(process, 0.5)

    monkeypatch.setattr(stage, "_await", until_it_hangs)
    run_stage(STAGE, arguments(tmp_path, "hangs"))
    monkeypatch.undo()
    run_stage(STAGE, arguments(tmp_path, "hangs", "good"))
    found = results(tmp_path)
    assert found["hangs"]["finding"]["faults"][0].startswith("ended after its limit of")
    assert [reading["name"] for reading in found["hangs"]["finding"]["readings"]] == ["before"]
    assert found["good"]["verdict"] == "ok"
    child = int((tmp_path / "child").read_text())
    give_up_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < give_up_s, f"process {child} of the ended item lives on"
        time.sleep(0.05)


def test_a_killed_stage_goes_on_where_it_was(tmp_path: Path) -> None:
    program = f"import sys; from {STAGE.module} import STAGE; from scripts.gpu.stage import run_stage; run_stage(STAGE)"
    killed = subprocess.Popen([sys.executable, "-c", program, *arguments(tmp_path, "good", "waits")], cwd=ROOT)
    ran = tmp_path / "ran"
    give_up_s = time.monotonic() + PATIENCE_S
    while not ran.exists() or "waits" not in ran.read_text():
        assert time.monotonic() < give_up_s and killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert list(results(tmp_path)) == ["good"]
    (tmp_path / "go").touch()
    assert run_stage(STAGE, arguments(tmp_path, "good", "waits")) == 0
    assert ran.read_text().split() == ["good", "waits", "waits"]
    assert list(results(tmp_path)) == ["good", "waits"]


def test_out_of_minutes_is_said_and_not_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_stage(STAGE, [*arguments(tmp_path, "good"), "--minutes", "0"]) == 1
    assert "run it again with the same --out for good" in capsys.readouterr().out
    assert run_stage(STAGE, arguments(tmp_path, "good")) == 0


def test_a_dry_run_ends_where_a_gpu_is_needed_and_its_results_are_not_taken_for_real_ones(tmp_path: Path) -> None:
    assert run_stage(STAGE, [*arguments(tmp_path, "needs_one"), "--dry-run"]) == 0
    assert results(tmp_path)["needs_one"]["verdict"] == "skipped"
    assert run_stage(STAGE, arguments(tmp_path, "needs_one")) == 1
    assert results(tmp_path)["needs_one"]["verdict"] == "wrong"
    assert (tmp_path / "out" / "stand_ins.dry.json").exists()


def test_again_forgets(tmp_path: Path) -> None:
    for extra in ([], ["--again", "good"], []):
        run_stage(STAGE, [*arguments(tmp_path, "good"), *extra])
    assert (tmp_path / "ran").read_text().split() == ["good", "good"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stand_ins.json"]
