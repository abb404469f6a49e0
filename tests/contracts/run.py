"""Other projects' tests of OpenAI servers against a Prism server on the demo models (``make contracts``).

    python -m tests.contracts.run [--suite vllm|sglang] [--sources DIR] [--url http://127.0.0.1:8000]

``DIR`` is a checkout of the suite's project; without one, vLLM's is its source archive, and of SGLang's only what
the installed package has is run. ``suites.toml`` says which tests apply. Ends with 1 if one fails that should not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.server import DEMOS, REPO, catalog, start

from .sources import fetch

HERE = Path(__file__).parent
TEST_LIMIT_S = 300
OPTIONS: dict[str, dict[str, Any]] = {
    "demo-llama": {
        "context_length": 1000,
        "tool_call_parser": "qwen25",
    },  # what SGLang's test of request lengths starts its server with
    "demo-qwen3": {"context_length": 2048, "tool_call_parser": "qwen25"},
    "demo-stablelm": {},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("vllm", "sglang"), help="only this one")
    parser.add_argument("--sources", type=Path, help="a checkout of the suite's project (with --suite)")
    parser.add_argument("--url", help="a server that runs already, with the names of suites.toml as aliases")
    options = parser.parse_args()
    if options.sources and not options.suite:
        parser.error("--sources needs --suite: it is one project's checkout")
    suites = tomllib.loads((HERE / "suites.toml").read_text())
    names = [options.suite] if options.suite else ["vllm", "sglang"]
    with tempfile.TemporaryDirectory(prefix="contracts-") as temporary, _server(options.url, suites["models"]) as url:
        folder = Path(temporary)
        return max(_run(name, suites, options.sources, folder / name, url) for name in names)


@contextmanager
def _server(url: str | None, aliases: dict[str, list[str]]) -> Iterator[str]:
    if url is not None:
        yield url
        return
    models = _demo_models()
    with tempfile.TemporaryDirectory(prefix="contracts-server-") as folder:
        config = catalog(models)
        for model in config["models"]:
            model.update(OPTIONS[model["name"]], aliases=aliases[model["name"]])
        server = start(Path(folder), config)
        try:
            yield server.url
        finally:
            server.stop()


def _demo_models() -> Path:
    models = REPO / "demo-models"
    if not (models / ".complete").exists():
        raise SystemExit(f"{models} is not there: run `make demo`")
    return models


def _run(name: str, suites: dict[str, Any], sources: Path | None, folder: Path, url: str) -> int:
    suite = suites[name]
    folder.mkdir()
    results = folder / "results.json"
    files = _vllm_files(suite, sources, folder) if name == "vllm" else _sglang_files(suite, sources, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "PRISM_CONTRACTS_URL": url,
        "PRISM_CONTRACTS_RULES": json.dumps(suite),
        "PRISM_CONTRACTS_RESULTS": str(results),
        "PRISM_CONTRACTS_MODELS": json.dumps(
            {alias: str(REPO / "demo-models" / demo) for demo in DEMOS for alias in (demo, *suites["models"][demo])}
        ),
    }
    (folder / "pytest.ini").write_text("[pytest]\n")  # ours does not apply
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=10", "-p", f"stand_ins.{name}_suite"]
    command += [f"--timeout={TEST_LIMIT_S}", "-p", "no:cacheprovider", f"--rootdir={folder}", *map(str, files)]
    with (REPO / f"contracts-{name}.log").open("w") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if not results.exists():
        print(f"{name}: pytest did not run; contracts-{name}.log says why")
        return 1
    return _report(name, json.loads(results.read_text()))


def _vllm_files(suite: dict[str, Any], sources: Path | None, folder: Path) -> list[Path]:
    """The suite's files in a package ``tests`` of their own, with conftest files as far as they need no vLLM."""
    root = Path(suite["root"])
    checkout = sources or fetch("vllm", suite["version"], folder / "archive", suite["root"])
    kept = ["tests/__init__.py", "tests/entrypoints/__init__.py", "tests/entrypoints/conftest.py"]
    shutil.copytree(checkout / root, folder / root)
    for file in kept:
        shutil.copy(checkout / file, folder / file)
    return [folder / root / file for file in suite["files"]]


def _sglang_files(suite: dict[str, Any], sources: Path | None, folder: Path) -> list[Path]:
    kits = folder / "test_kits.py"
    shutil.copy(HERE / "stand_ins" / "sglang_kits.py", kits)
    if sources is None:
        return [kits]
    copied = [folder / Path(file).name for file in suite["files"]]
    for file, copy in zip(suite["files"], copied, strict=True):
        shutil.copy(sources / suite["root"] / file, copy)
    return [kits, *copied]


def _report(name: str, results: dict[str, Any]) -> int:
    """Prints every test that did not pass with its reason, and counts; 1 with an unexplained failure."""
    tests: dict[str, dict[str, str]] = results["tests"]
    for test, end in sorted(tests.items()):
        if end["end"] != "passed":
            print(f"{end['end']:<15} {test}: {end['reason']}")
    for pattern in results["stale"]:
        print(f"matches no test  {pattern}")
    counts = Counter(end["end"] for end in tests.values())
    print(f"{name}: " + ", ".join(f"{n} {end}" for end, n in sorted(counts.items())))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
