"""Small parts: the driver stand-in, engine arguments, diagnoses, the request tracker."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.core.specs import DeviceKind, ModelShape, ModelSpec
from prism.engine import boot, cuda_stub, gpu
from prism.engine.api import longest_activation_s
from prism.engine.diagnosis import diagnose
from prism.engine.errors import ActivationCause, EngineSetupError
from prism.engine.images import image_keys
from prism.engine.sglang_args import COMMON, CUDA, server_arguments, stored_dtype
from prism.memory.errors import LimitExceeded, OutOfMemory

SHAPE = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)


def spec(path: Path, **changes: Any) -> ModelSpec:
    made = ModelSpec(ModelName("m"), str(path), 1.0, 0.1, 100, SHAPE, 512)
    return dataclasses.replace(made, **changes)


def test_the_stub_builds_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "libcuda.so.1"
    cuda_stub.build(path)
    cuda_stub.build(path)
    assert ctypes.CDLL(str(path)).cuPointerGetAttribute() == 100


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineSetupError, match="C compiler"):
        cuda_stub.build(tmp_path / "libcuda.so.1")


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_arguments_keep_the_stored_dtype_and_the_catalogs_own(tmp_path: Path, kind: DeviceKind) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    found = server_arguments(spec(tmp_path, engine_args=(("chunked_prefill_size", 512), ("x", (1, 2)))), kind)
    assert found["dtype"] == "float32"
    assert found["chunked_prefill_size"] == 512
    assert found["x"] == [1, 2]
    assert found["context_length"] == 512
    assert found["page_size"] == 1
    json.dumps(found)


def test_steps_overlap_on_gpus_unless_told_otherwise(tmp_path: Path) -> None:
    def overlaps(kind: DeviceKind, overlap: bool | None = None, **engine_args: object) -> bool:
        made = server_arguments(spec(tmp_path, engine_args=tuple(engine_args.items())), kind, overlap)
        assert image_keys("mark", 1, made) == image_keys("mark", 1, {**made, "disable_overlap_schedule": None})
        return not made["disable_overlap_schedule"]

    assert overlaps(DeviceKind.CUDA) and not overlaps(DeviceKind.HOST)
    assert overlaps(DeviceKind.HOST, True) and not overlaps(DeviceKind.CUDA, False)
    assert not overlaps(DeviceKind.CUDA, enable_mixed_chunk=True), "its penalties are counted on the host"


def test_arguments_of_prisms_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"models\.m\.engine_args\.sleep_on_idle"):
        server_arguments(spec(tmp_path, engine_args=(("sleep_on_idle", True),)), DeviceKind.HOST)


@pytest.mark.parametrize("text", ["", "[]", "{not", '{"dtype": "int3"}'])
def test_an_unreadable_dtype_is_left_to_sglang(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert stored_dtype(tmp_path) is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemory("no"), ActivationCause.OUT_OF_MEMORY),
        (LimitExceeded("no"), ActivationCause.OUT_OF_MEMORY),
        (FileNotFoundError("x"), ActivationCause.MISSING),
        (RuntimeError("Cannot find any model weights with `x`"), ActivationCause.MISSING),
        (ValueError("Model architectures ['X'] are not supported for now."), ActivationCause.UNSUPPORTED),
        (RuntimeError("The size of tensor a (1) must match the size of tensor b (2)"), ActivationCause.CORRUPT),
        (json.JSONDecodeError("x", "y", 0), ActivationCause.CORRUPT),
        (ZeroDivisionError("x"), ActivationCause.INTERNAL),
    ],
)
def test_diagnoses(error: Exception, cause: ActivationCause) -> None:
    assert diagnose(error)[0] == cause.value
    try:
        raise RuntimeError("while loading") from error
    except RuntimeError as wrapped:
        if cause is not ActivationCause.INTERNAL:
            assert diagnose(wrapped)[0] == cause.value


def test_a_large_model_may_take_long(tmp_path: Path) -> None:
    assert longest_activation_s(spec(tmp_path, weight_bytes=140 << 30)) > 1500


@pytest.mark.parametrize(("runs", "said"), [(False, "not running"), (True, "side by side")])
def test_mps_is_reported(monkeypatch: pytest.MonkeyPatch, runs: bool, said: str) -> None:
    monkeypatch.setattr(gpu, "mps_runs", lambda: runs)
    assert said in gpu.mps_remark()


def test_the_compiler_that_came_with_torch_is_found(tmp_path: Path) -> None:
    found = gpu.cuda_home({"PATH": ""})
    assert found is not None and (found / "bin" / "nvcc").exists()
    own = tmp_path / "bin" / "nvcc"
    own.parent.mkdir()
    own.touch(0o755)
    assert gpu.cuda_home({"PATH": str(own.parent)}) == tmp_path == gpu.cuda_home({"CUDA_HOME": str(tmp_path)})


def test_gpu_arguments_capture_few_graphs() -> None:
    """SGLang takes them as they are meant: none for prefill, few sizes for decoding."""
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.server_args import ServerArgs
    fields = {f.name for f in dataclasses.fields(ServerArgs)}
    assert {*COMMON, *CUDA} <= fields
    made = object.__new__(ServerArgs)
    for field in dataclasses.fields(ServerArgs):
        if field.default is not dataclasses.MISSING:
            setattr(made, field.name, field.default)
    for name, value in CUDA.items():
        setattr(made, name, value)
    made._parse_cuda_graph_config()
    assert made.cuda_graph_config.prefill.backend == "disabled"
    assert made.cuda_graph_config.decode.backend != "disabled"
    assert made.cuda_graph_config.decode.bs == [1, 2, 4, 8, 16, 32, 64]
