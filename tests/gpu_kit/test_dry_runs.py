"""Every stage runs without a GPU as far as it can: nothing is wrong, every item has its verdict, the file is JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.gpu.item import stage_of
from scripts.gpu.layouts import SHAPES, family, latent_token_bytes
from scripts.gpu.stage import ROOT, run_stage
from tests.engine.families import SMALL

QUICK = {
    "stage1_memory": ["discovery", "driver_calls", "contexts", "old_contents", "seen", "prism_pages"],
    "stage2_loader": ["raw", "clean"],
    "stage6_load": ["stock", "in_turns"],
    "stage8_teams": ["peers"],
}
WHOLE = ["stage1_memory", "stage2_loader", "stage6_load"]
STAGES = sorted(path.stem for path in (ROOT / "scripts" / "gpu").glob("stage?_*.py"))


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
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_stage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others start large or many engines: docs/gpu.md says how far their dry runs have come."""
    dry_run(name, tmp_path, [item.name for item in stage_of(f"scripts.gpu.{name}").items], monkeypatch)


def test_one_command_runs_the_stages_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kept, out, scratch = tmp_path / "kept", tmp_path / "out", Path("/dev/shm") / f"prism-kit-go-{os.getpid()}"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PRISM_GPU_RESULTS": str(kept), "OUT": str(out)}
    command = ["scripts/gpu/go.sh", "2", "--", "--dry-run", "--scratch", str(scratch), "--only", "clean"]

    def go(*more: str, minutes: str = "9") -> subprocess.CompletedProcess[str]:
        found = {**environ, "PRISM_GPU_MINUTES": minutes}
        return subprocess.run([*command, *more], cwd=ROOT, env=found, capture_output=True, text=True, check=False)

    try:
        assert "out of minutes" in (late := go(minutes="0")).stdout and late.returncode == 1
        assert "clean" in (done := go()).stdout and done.returncode == 0, done.stderr
        first = json.loads((out / "stage2_loader.json").read_text())["items"]["clean"]
        assert go().returncode == 0
        assert json.loads((kept / "stage2_loader.json").read_text())["items"]["clean"] == first, "not run again"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    command[1] = "9"
    assert "there is no stage 9" in go().stderr


def test_models_of_other_layouts_have_configurations() -> None:
    import transformers

    for name in SHAPES:
        for tiny in (True, False):
            found = family(name, tiny=tiny)
            config = getattr(transformers, f"{found.config}Config")(**(SMALL | found.options))
            assert config.num_hidden_layers in (2, 4)
    assert latent_token_bytes(4) == 4 * 2 * (512 + 64)


def test_a_stage_ends_within_its_limits_where_nothing_hangs() -> None:
    assert [name[5] for name in STAGES] == [str(i) for i in range(1, 9)], "go.sh runs them by number"
    for name in STAGES:
        stage = stage_of(f"scripts.gpu.{name}")
        assert len({item.name for item in stage.items}) == len(stage.items)
        assert all(item.limit_s <= 8 * 60 for item in stage.items)
