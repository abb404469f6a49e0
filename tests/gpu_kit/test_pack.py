"""Packing: what is trimmed, how parts are divided, and that pip takes what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.gpu import pack
from scripts.gpu.trim import Untrimmable, trim
from scripts.gpu.wheels import FIRST, SECOND, WANTED, Wanted

NAME = "tiny-1.0-py3-none-any.whl"
FILES = {
    "tiny/__init__.py": b"KEPT = True\n",
    "tiny/E=64,N=768.json": b"{}",
    "tiny/data/big.bin": bytes(50_000),
    "tiny/data/deep/big.bin": bytes(50_000),
    "tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/RECORD": b"tiny/__init__.py,,\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "published" / NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in FILES.items():
            file.writestr(name, data)
    return path


def test_trimming_drops_what_it_says_and_pip_installs_the_rest(wheel: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    small = trim(wheel, out, ["tiny/data/*"])
    with zipfile.ZipFile(small) as file:
        assert sorted(file.namelist()) == sorted(n for n in FILES if "/data/" not in n)
        record = file.read("tiny-1.0.dist-info/RECORD").decode()
    assert "data" not in record and "tiny/__init__.py,sha256=" in record and '"tiny/E=64,N=768.json",sha256=' in record
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(small)], check=True)
    code = "import tiny; assert tiny.KEPT"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(tmp_path / "site")})


def test_metadata_stays_whatever_a_pattern_says(wheel: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    with zipfile.ZipFile(trim(wheel, out, ["*"])) as file:
        assert all(".dist-info/" in name for name in file.namelist())
        assert len(file.namelist()) == 3


def test_a_pattern_that_matches_nothing_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(Untrimmable, match=r"tiny-1.0-py3-none-any.whl has no file tiny/cubins/\*"):
        trim(wheel, tmp_path, ["tiny/cubins/*"])


@pytest.mark.parametrize(
    ("limit", "parts"),
    [(1000, {"a": FIRST, "b": FIRST}), (700, {"a": FIRST, "b": SECOND})],
)
def test_one_part_if_it_fits_else_two(limit: int, parts: dict[str, str]) -> None:
    assert pack.divide({"a": (FIRST, 500), "b": (SECOND, 400)}, tree=100, limit=limit) == parts


def test_a_part_that_does_not_fit_is_refused() -> None:
    with pytest.raises(pack.DoesNotFit, match=r"part A and the tree are 2.0 MiB, the limit is 1.0 MiB"):
        pack.divide({"a": (FIRST, pack.MIB)}, tree=pack.MIB, limit=pack.MIB)


def test_the_manifest_says_what_is_in_the_folders(wheel: Path, tmp_path: Path) -> None:
    into = tmp_path / "kit"
    wanted = Wanted("tiny", SECOND, drop=("tiny/data/*",))
    pack.pack([(wanted, wheel)], into, tree=10, limit=pack.MIB, python="3.12")
    manifest = json.loads((into / "manifest.json").read_text())
    packed = manifest["wheels"][NAME]
    assert packed["part"] == FIRST and packed["dropped"] == ["tiny/data/*"]
    assert packed["packed_bytes"] == (into / FIRST / NAME).stat().st_size == manifest["parts"][FIRST]
    assert packed["published_bytes"] == wheel.stat().st_size > 10 * packed["packed_bytes"]


def test_every_wanted_wheel_has_a_locked_version() -> None:
    versions = pack.locked_versions(pack.ROOT / "requirements.lock")
    assert [w.name for w in WANTED if w.name not in versions] == []
    assert len({w.name for w in WANTED}) == len(WANTED)
