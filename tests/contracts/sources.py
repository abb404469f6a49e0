"""Where the suites come from: a folder that the caller has, or a package's source archive, unpacked by pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def fetch(package: str, version: str, folder: Path, root: str) -> Path:
    """The unpacked source archive of ``package``: the folder that holds ``root``, somewhere under ``folder``.

    pip has no command that only unpacks. It is asked to download without building, which fails where it would ask the
    package's build for metadata (that needs torch); ``--no-clean`` leaves what it had unpacked until then.

    Raises:
        FileNotFoundError: the archive could not be had or has no ``root``; with pip's last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean", "-d", str(folder / "out")]
    pip = [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"]
    done = subprocess.run(pip, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    for found in folder.glob(f"pip-*/*/{root}"):
        return found.parents[len(Path(root).parts) - 1]
    raise FileNotFoundError(f"no {root} in the source archive of {package} {version}; pip said: {done.stderr[-500:]}")
