"""Compiled modules are used when they are asked for, of these sources, before any other; and decide the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism.compiled import STAMP, VARIABLE, digest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What stands for a module compiled of ``prism/core/ids.py``."""
    made = tmp_path / "compiled" / "prism" / "core"
    made.mkdir(parents=True)
    (made / "ids.py").write_text("COMPILED = True\n")
    stamp(tmp_path / "compiled", "prism.core.ids", digest(ROOT / "prism" / "core" / "ids.py"))
    return tmp_path / "compiled"


def stamp(folder: Path, name: str, of_source: str) -> None:
    (folder / STAMP).write_text(json.dumps({name: of_source}))


def run(code: str, folder: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if folder is not None:
        environment[VARIABLE] = str(folder)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_asked_for_they_are_used_and_else_not(folder: Path) -> None:
    code = "import prism.core.ids as ids; print(hasattr(ids, 'COMPILED'))"
    assert run(code, folder).stdout == "True\n"
    assert run(code, None).stdout == "False\n"


def test_others_than_these_sources_are_an_error_that_says_what_to_do(folder: Path) -> None:
    stamp(folder, "prism.core.ids", "0" * 64)
    found = run("import prism", folder)
    assert found.returncode == 1
    assert "other sources (prism.core.ids); run `make compiled`, or unset PRISM_COMPILED" in found.stderr
    stamp(folder, "prism.core.gone", "0" * 64)
    assert "other sources (prism.core.gone)" in run("import prism", folder).stderr
    (folder / STAMP).unlink()
    assert "there is no sources.json in it; run `make compiled`" in run("import prism", folder).stderr


def test_too_late_is_an_error(folder: Path) -> None:
    code = (
        "import prism.core.ids; from pathlib import Path; from prism.compiled import use_compiled;"
        f"use_compiled(Path({str(folder)!r}), Path({str(ROOT)!r}))"
    )
    found = run(code, None)
    assert found.returncode == 1
    assert "comes too late: prism.core.ids was imported already" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_simulator_decides_the_same(tmp_path: Path) -> None:
    """With faults, a pinned model and one that serves while it loads: the decision logs are equal, byte for byte."""
    compiled, trace = tmp_path / "compiled", tmp_path / "trace.jsonl"
    quickly = {**os.environ, "CFLAGS": "-O0", VARIABLE: str(compiled)}  # not there yet, and no reason to fail
    subprocess.run([sys.executable, "scripts/compile_simulator.py", str(compiled)], cwd=ROOT, env=quickly, check=True)
    spec = {"preset": "novita", "seed": 5, "models": 8, "duration": 330, "rate-rps": 8}
    options = [part for name, value in spec.items() for part in (f"--{name}", str(value))]
    names = ",".join(f"model-{i}" for i in range(8))
    prism("trace", "generate", *options, "--names", names, str(trace))
    catalog = tmp_path / "catalog.yaml"
    plain = (ROOT / "examples" / "sim" / "catalog-8.yaml").read_text()
    changed = plain.replace("{name: model-2,", "{name: model-2, pin: true,").replace(
        "{name: model-1,", "{name: model-1, live_scaling: auto,"
    )
    catalog.write_text(changed)
    cluster = tmp_path / "cluster.yaml"
    plain = (ROOT / "examples" / "sim" / "cluster-faults.yaml").read_text()
    cluster.write_text(plain.replace("gpus_per_node: 2}", "gpus_per_node: 2, rates: {process_bytes: 1.0e+9}}"))
    files = ["--cluster", str(cluster), "--catalog", str(catalog)]
    for policy in ("prism", "serverlessllm"):
        logs = []
        for folder in (None, compiled):
            log = tmp_path / f"{policy}-{folder is None}.jsonl"
            prism("sim", "run", str(trace), *files, "--policy", policy, "--decisions", str(log), folder=folder)
            logs.append(log.read_bytes())
        assert logs[0].count(b"\n") > 100
        assert logs[0] == logs[1], policy


def prism(*arguments: str, folder: Path | None = None) -> None:
    code = f"from prism.cli.main import main; main({list(arguments)!r})"
    found = run(code, folder)
    assert found.returncode == 0, found.stderr
