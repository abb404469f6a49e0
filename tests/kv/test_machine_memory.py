"""What the machine has left: of itself, and of the control groups that a process is in."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from prism.kv.machine_memory import SpareMemory, available_bytes, headroom_bytes

MIB = 1 << 20


def group(folder: Path, bound: str, current: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{bound}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon {current - inactive}\ninactive_file {inactive}\nactive_file 0\n")


def test_the_narrowest_of_all_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("12:cpu:/x\n0::/pods/mine\n")
    group(root / "pods" / "mine", "max", 50 * MIB, 0)
    group(root / "pods", str(100 * MIB), 90 * MIB, 20 * MIB)
    assert available_bytes(root, own) == min(30 * MIB, psutil.virtual_memory().available)
    group(root / "pods" / "mine", str(60 * MIB), 58 * MIB, 1 * MIB)
    assert available_bytes(root, own) == 3 * MIB
    (root / "pods" / "mine" / "memory.stat").write_text("nonsense")
    assert available_bytes(root, own) == 30 * MIB, "what cannot be read bounds nothing"


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path / "none") > 0
    assert 0 < headroom_bytes() <= 1 << 30


def test_what_is_spare_is_looked_up_when_it_is_old_and_followed_meanwhile() -> None:
    now_s, left = [0.0], [10]
    spare = SpareMemory(4, lambda: left[0], lambda: now_s[0])
    assert spare() == 6
    left[0] = 1
    spare.changed(-5)
    assert spare() == 1
    now_s[0] = 1.0
    assert spare() == -3
