"""Compile what the simulator runs for each event to C extensions (mypyc): ``make compiled``.

    python scripts/compile_simulator.py [FOLDER]

FOLDER (build/compiled) gets a module beside the other, what they have in common, and the digests of their sources, by
which :mod:`prism.compiled` sees whether they are still of these. CC and CFLAGS mean what they always do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("PRISM_COMPILED", None)  # what it names may be what is to be made anew

from prism.compiled import STAMP, digest  # noqa: E402

PACKAGES: Final = ("prism/core", "prism/policy", "prism/scheduler", "prism/sim")
NOT_COMPILED: Final = ("import msgspec", "from msgspec", "import multiprocessing")
"""Sources with such a line stay as they are: msgspec's structs are made at run time, and what goes to other processes
is pickled."""
OPTIMISED: Final = ("-O2", "-g0", "-fPIC", "-w")


def modules() -> list[str]:
    """Sources to be compiled, relative to the root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py" and _can_be(path))


def _can_be(source: Path) -> bool:
    return not any(line.startswith(NOT_COMPILED) for line in source.read_text().splitlines())


def compile_all(folder: Path) -> None:
    """Write C, compile it, and put it into ``folder``, which is made anew. Ends the process where mypyc finds errors,
    or a compiler is missing."""
    from mypyc.build import mypycify

    os.chdir(ROOT)
    sources, work = modules(), folder.with_name(folder.name + ".c")
    for old in (folder, work):
        shutil.rmtree(old, ignore_errors=True)
    print(f"[1/2] {len(sources)} modules to C (a minute or two)", flush=True)
    extensions = mypycify(sources, target_dir=str(work), multi_file=True, opt_level="2", debug_level="0")
    print(f"[2/2] compiling C on {os.cpu_count()} cores (a minute or two)", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for extension in extensions:
            _link(extension, list(pool.map(lambda c, e=extension: _object(c, e, work), extension.sources)), folder)
    digests = {one.removesuffix(".py").replace("/", "."): digest(ROOT / one) for one in sources}
    (folder / STAMP).write_text(json.dumps(digests, indent=0))
    shutil.rmtree(work)
    print(f"PRISM_COMPILED={folder} makes a process use them")


def _object(source: str, extension: Any, work: Path) -> Path:
    """The object file of one file of C."""
    made: Path = work / "objects" / str(extension.name) / (Path(source).name + ".o")
    made.parent.mkdir(parents=True, exist_ok=True)
    folders = [*extension.include_dirs, str(work), sysconfig.get_paths()["include"]]
    flags = [*OPTIMISED, *os.environ.get("CFLAGS", "").split(), *(f"-I{one}" for one in folders)]
    _run([*_compiler(), *flags, "-c", source, "-o", str(made)])
    return made


def _link(extension: Any, objects: Sequence[Path], folder: Path) -> None:
    made = folder.joinpath(*extension.name.split("."))
    made = made.with_name(made.name + sysconfig.get_config_var("EXT_SUFFIX"))
    made.parent.mkdir(parents=True, exist_ok=True)
    _run([*_compiler(), "-shared", *map(str, objects), "-o", str(made)])


def _compiler() -> list[str]:
    return os.environ.get("CC", "cc").split()


def _run(command: Sequence[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"this failed: {' '.join(command)}")


if __name__ == "__main__":
    compile_all(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "compiled").resolve())
