"""Every stage runs without a GPU as far as it can: nothing is wrong, every item has its verdict, the file is JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from scripts.gpu.item import stage_of
from scripts.gpu.stage import run_stage

QUICK = {
    "stage1_memory": ["discovery", "driver_calls", "contexts", "old_contents", "seen", "prism_pages"],
    "stage2_loader": ["raw", "clean"],
    "stage6_load": ["stock", "in_turns"],
}
STAGES = ["stage1_memory", "stage2_loader", "stage3_boot", "stage4_activation", "stage5_sharing", "stage6_load"]


def dry_run(name: str, folder: Path, items: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stage = stage_of(f"scripts.gpu.{name}")
    scratch = Path("/dev/shm") / f"prism-kit-test-{os.getpid()}"
    options = ["--dry-run", "--out", str(folder), "--scratch", str(scratch), "--minutes", "60", "--only", *items]
    try:
        assert run_stage(stage, options) == 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["is_dry"] and list(found["items"]) == items
    assert {item["verdict"] for item in found["items"].values()} <= {"ok", "skipped"}
    assert all(item["finding"]["is_over"] for item in found["items"].values())


@pytest.mark.parametrize("name", QUICK)
def test_what_needs_no_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dry_run(name, tmp_path, QUICK[name], monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK)
def test_a_whole_stage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 3 to 5 start large engines: docs/gpu.md says how far their dry runs have come."""
    dry_run(name, tmp_path, [item.name for item in stage_of(f"scripts.gpu.{name}").items], monkeypatch)


def test_a_stage_ends_within_eight_minutes_where_nothing_hangs() -> None:
    for name in STAGES:
        stage = stage_of(f"scripts.gpu.{name}")
        assert len({item.name for item in stage.items}) == len(stage.items)
        assert all(item.limit_s <= 8 * 60 for item in stage.items)
