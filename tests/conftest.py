"""Settings of all tests."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# scripts/sanitize.sh puts another build of the extension into the place of the installed one: before anything of Prism
# is imported, since a process can have only one of the two.
if "KVCACHED_EXTENSION" in os.environ:
    _spec = importlib.util.spec_from_file_location("prism.memory._kvcached", os.environ["KVCACHED_EXTENSION"])
    assert _spec is not None and _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

from prism.engine import boot, cuda_stub
from tests.guard import Guard, guard_of, guarded, taken_clocks

REPO = Path(__file__).resolve().parents[1]

# SGLang decides when it is imported first which kernels there are. Who imports it before this, by whatever test comes
# first, has none in this process for good.
cuda_stub.load()


class PreparedFirst(MetaPathFinder):
    """Likewise it decides then, for good, that it computes on CPUs. Imports at the top of a test's file are made while
    tests are collected, before any fixture prepares anything."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            boot.prepare_environment("host")


sys.meta_path.insert(0, PreparedFirst())

# How long an example takes says something about the machine, not about the code. Examples are the same in every run, so
# that a change is judged and not luck; `make explore` looks for others.
settings.register_profile(
    "prism",
    deadline=None,
    derandomize=not os.environ.get("PRISM_EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("prism")


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the demo models, which tests read and never change: that of `make demo` if it is up to date (all
    targets that run engines make it), else one that is made now."""
    script, made = REPO / "scripts" / "make_demo_models.py", REPO / "demo-models"
    stamp = made / ".complete"
    if stamp.exists() and stamp.stat().st_mtime >= script.stat().st_mtime:
        return made
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


@pytest.fixture(autouse=True)
def nothing_forbidden_is_reached(request: pytest.FixtureRequest) -> Iterator[None]:
    """See :mod:`tests.guard`."""
    guard = guard_of(request.node.path, {mark.name for mark in request.node.iter_markers()})
    taken = taken_clocks(vars(request.module)) if guard is Guard.PURE else []
    assert not taken, f"{request.node.path.name} imports clocks by name ({', '.join(taken)}): {guard.value}"
    with guarded(guard):
        yield
