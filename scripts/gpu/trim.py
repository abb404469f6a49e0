"""Making a wheel smaller: files left out, debug symbols stripped, packed with LZMA (which pip unpacks as well)."""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import io
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class Untrimmable(RuntimeError):
    """The wheel cannot be trimmed as asked; the message says why."""


def trim(wheel: Path, into: Path, drop: Sequence[str] = (), *, strip: bool = False) -> Path:
    """Write a smaller ``wheel`` of the same name into the folder ``into``.

    Every file that matches a pattern of ``drop`` is left out, and its record corrected; metadata is never dropped.
    Raises :class:`Untrimmable` for a pattern that matches nothing (the wheel is not what the pattern was written for)
    and when ``strip`` finds no ``strip`` program.
    """
    with zipfile.ZipFile(wheel) as source:
        names = [n for n in source.namelist() if not n.endswith("/")]
        for pattern in drop:
            if not fnmatch.filter(names, pattern):
                raise Untrimmable(f"{wheel.name} has no file {pattern}")
        contents = {n: source.read(n) for n in names if ".dist-info/" in n or not _matches(n, drop)}
    if strip:
        contents = {name: _stripped(data) if _is_library(name) else data for name, data in contents.items()}
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    contents[record] = _record(contents, record)
    out = into / wheel.name
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as target:
        for name, data in contents.items():
            target.writestr(name, data)
    return out


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_library(name: str) -> bool:
    return name.endswith(".so") or ".so." in name


def _stripped(data: bytes) -> bytes:
    if shutil.which("strip") is None:
        raise Untrimmable("there is no program `strip`; install binutils")
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        subprocess.run(["strip", "--strip-debug", file.name], check=True)
        return Path(file.name).read_bytes()


def _record(contents: Mapping[str, bytes], record: str) -> bytes:
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")  # names may have commas in them
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.writerow((name, "", "") if name == record else (name, f"sha256={digest}", len(data)))
    return out.getvalue().encode()
