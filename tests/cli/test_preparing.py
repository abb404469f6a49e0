"""``prism doctor --prepare``: which server is started, what it is asked, what is told of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from prism.cli import preparing
from prism.cli.preparing import CannotPrepare, prepare, private_server
from prism.config.catalog import load_catalog
from prism.engine import boot
from prism.engine.kernels import FOLDERS, compiled_kernels, keep_kernels

CATALOG = """
models:
  - {name: one, path: one, pin: true, slo: {ttft: 500ms}, min_kv_memory: 64MiB}
  - {name: gone, path: nowhere}
  - {name: two, path: org/model, tp: 2}
devices: [{id: "host:0", memory: 64MiB}, {id: "host:1", memory: 32MiB}]
engines: {parked_per_device: 2, active_memory: 3GiB}
keys: [{name: me, key: secretsecret}]
server: {redis_url: "redis://elsewhere:6379", port: 80}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    (tmp_path / "c.yaml").write_text(CATALOG)
    return tmp_path / "c.yaml"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "prism" / "kernels"


def test_every_model_is_asked_by_a_server_of_its_own(catalog: Path, cache: Path) -> None:
    asked: list[str] = []
    served: list[Any] = []

    @contextmanager
    def serve(file: Path, state: Path) -> Iterator[SimpleNamespace]:
        served.append(load_catalog(file))

        def ask(model: str) -> None:
            asked.append(model)
            (cache / "triton").mkdir(parents=True, exist_ok=True)
            (cache / "triton" / f"{model}.cubin").touch()
            if model == "two":
                raise CannotPrepare("it does not fit")

        yield SimpleNamespace(ask=ask)

    found = {f.what: f for f in prepare(load_catalog(catalog), serve)}
    assert asked == ["one", "two"]
    assert found["kernels of one"].status == "ok" and "1 compiled" in found["kernels of one"].found
    assert found["kernels of two"].remedy == "it does not fit" and found["kernels of gone"].status == "missing"
    (private,) = served
    original = load_catalog(catalog)
    assert private.devices == original.devices and private.engines == original.engines
    assert private.model("one").path == str(catalog.parent / "one") and private.model("two").path == "org/model"
    assert private.model("one").slo == original.model("one").slo and private.model("two").tp == 2
    assert not private.model("one").pinned, "all at once may not fit"
    assert private.keys == () and private.server.redis_url is None, "nobody else's store, no keys to know"


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho the GPU is on fire; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(preparing.sys, "executable", str(program))
    with (
        pytest.raises(CannotPrepare, match="ended: the GPU is on fire"),
        private_server(tmp_path / "c.yaml", tmp_path / "state"),
    ):
        pass


def test_prepare_needs_a_catalog(prism: Callable[..., Result]) -> None:
    shown = prism("doctor", "--prepare")
    assert shown.exit_code == 2 and "needs --catalog" in shown.output


def test_what_one_process_compiles_others_find(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, restarted servers and --prepare share one folder, which a boot does not empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    for name in (*boot.ENVIRONMENT, *boot.CUDA_ENVIRONMENT, "CUDA_HOME"):
        monkeypatch.setenv(name, "")  # put back afterwards
    boot.prepare_environment("cuda")
    assert {name: os.environ[name] for name in FOLDERS} == {
        "TVM_FFI_CACHE_DIR": str(cache / "tvm-ffi"),
        "TRITON_CACHE_DIR": "/somewhere/else",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
    }
    for name in FOLDERS:
        monkeypatch.setenv(name, os.environ[name])


def test_compiled_kernels_are_found_where_they_are_kept(cache: Path, tmp_path: Path) -> None:
    environ: dict[str, str] = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert compiled_kernels(environ) == set()
    keep_kernels(environ)
    (cache / "tvm-ffi" / "deep").mkdir(parents=True)
    for file in ("a.so", "deep/b.cubin", "deep/b.json"):
        (cache / "tvm-ffi" / file).touch()
    assert {path.name for path in compiled_kernels(environ)} == {"a.so", "b.cubin"}
