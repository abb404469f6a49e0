"""Packs what a machine with a GPU but without registries lacks: trimmed wheels for its Python, in parts small enough to
copy there beside the repository.

    python -m scripts.gpu.pack [--into .gpu-kit] [--limit-mib 60] [--python 3.12]

Writes ``wheels/`` (as published, kept for the next time), ``A/`` or ``A/`` and ``B/`` (trimmed), and ``manifest.json``.
One part is made if everything fits beside the repository's own tree; two if each of them does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from scripts.gpu.trim import trim
from scripts.gpu.wheels import FIRST, SECOND, WANTED, Wanted

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 1 << 20
GLIBC_MINORS: Final = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
OLD_NAMES: Final = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")


class DoesNotFit(SystemExit):
    """The kit is larger than what can be copied at once; the message has the numbers."""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """One wheel of the kit."""

    part: str
    published_bytes: int
    packed_bytes: int
    dropped: tuple[str, ...] = ()
    is_stripped: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was packed, in bytes."""

    python: str
    tree_bytes: int
    limit_bytes: int
    parts: dict[str, int]
    wheels: dict[str, Packed]


def locked_versions(lock: Path) -> dict[str, str]:
    """Name -> version of every line ``name==version``."""
    lines = (line.split("==") for line in lock.read_text("utf-8").splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, version in lines}


def download(wanted: Wanted, version: str, python: str, into: Path) -> Path:
    """The published wheel, from the package index unless it is there already."""
    if found := _found(into, wanted.name, version):
        return found
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS] + list(OLD_NAMES)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(into)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [option for platform in platforms for option in ("--platform", platform)]
    subprocess.run([*command, f"{wanted.name}=={version}"], check=True)
    found = _found(into, wanted.name, version)
    assert found is not None, f"pip saved no wheel of {wanted.name} {version}"
    return found


def _found(folder: Path, name: str, version: str) -> Path | None:
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def tree_bytes(root: Path) -> int:
    """What the repository itself weighs: the files git knows, and those it would not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    return sum((root / name).lstat().st_size for name in names if name and (root / name).exists())


def divide(sizes: dict[str, tuple[str, int]], tree: int, limit: int) -> dict[str, str]:
    """Wheel -> part, from wheel -> (part it belongs to, bytes). Everything is one part if that fits into ``limit``
    beside the ``tree``; raises :class:`DoesNotFit` if a part does not."""
    if tree + sum(size for _, size in sizes.values()) <= limit:
        return dict.fromkeys(sizes, FIRST)
    for part in (FIRST, SECOND):
        total = tree + sum(size for where, size in sizes.values() if where == part)
        if total > limit:
            raise DoesNotFit(f"part {part} and the tree are {total / MIB:.1f} MiB, the limit is {limit / MIB:.1f} MiB")
    return {name: part for name, (part, _) in sizes.items()}


def pack(wheels: Sequence[tuple[Wanted, Path]], into: Path, tree: int, limit: int, python: str) -> Manifest:
    """Trim every published wheel, divide them into parts under ``into`` and write the manifest."""
    trimmed = into / "trimmed"
    shutil.rmtree(trimmed, ignore_errors=True)
    trimmed.mkdir(parents=True)
    small = {path.name: trim(path, trimmed, wanted.drop, strip=wanted.strip) for wanted, path in wheels}
    sizes = {path.name: (wanted.part, small[path.name].stat().st_size) for wanted, path in wheels}
    parts = divide(sizes, tree, limit)
    for part in (FIRST, SECOND):
        shutil.rmtree(into / part, ignore_errors=True)
    packed = {}
    for wanted, path in wheels:
        part, size = parts[path.name], sizes[path.name][1]
        (into / part).mkdir(exist_ok=True)
        small[path.name].rename(into / part / path.name)
        packed[path.name] = Packed(
            part=part,
            published_bytes=path.stat().st_size,
            packed_bytes=size,
            dropped=wanted.drop,
            is_stripped=wanted.strip,
        )
    trimmed.rmdir()
    totals = {
        part: sum(p.packed_bytes for p in packed.values() if p.part == part) for part in sorted({*parts.values()})
    }
    manifest = Manifest(python=python, tree_bytes=tree, limit_bytes=limit, parts=totals, wheels=packed)
    (into / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def show(manifest: Manifest) -> None:
    """The manifest for people, largest first."""
    for name, wheel in sorted(manifest.wheels.items(), key=lambda entry: -entry[1].packed_bytes):
        print(f"{wheel.part} {wheel.packed_bytes / MIB:7.2f} MiB (of {wheel.published_bytes / MIB:7.2f})  {name}")
    for part, size in manifest.parts.items():
        whole = (size + manifest.tree_bytes) / MIB
        print(f"part {part}: {size / MIB:.1f} MiB, with the tree {whole:.1f} of {manifest.limit_bytes / MIB:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / ".gpu-kit", metavar="DIR")
    parser.add_argument("--limit-mib", type=float, default=60.0, help="most that is copied at once, the tree included")
    parser.add_argument("--python", default="3.12", help="version of Python over there")
    options = parser.parse_args()
    published = options.into / "wheels"
    published.mkdir(parents=True, exist_ok=True)
    versions = locked_versions(ROOT / "requirements.lock")
    wheels = [(w, download(w, versions[w.name], options.python, published)) for w in WANTED]
    show(pack(wheels, options.into, tree_bytes(ROOT), int(options.limit_mib * MIB), options.python))


if __name__ == "__main__":
    main()
