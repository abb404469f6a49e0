"""The demo models that benchmarks run, and how an engine pool is told of one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prism.core.ids import ModelName
from prism.core.specs import ModelShape, ModelSpec

_ROOT = Path(__file__).resolve().parents[1]
_SHAPE = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)


def kept_models() -> Path:
    """The folder of demo models that this checkout keeps, made unless it is whole."""
    folder = _ROOT / "demo-models"
    if not (folder / ".complete").exists():
        _make(folder)
    return folder


def given_models(given: Path | None) -> Path:
    """The folder that was ``given``, as it is; None: a new one with the demo models."""
    if given is None:
        given = Path(tempfile.mkdtemp(prefix="prism-models-"))
        _make(given)
    return given


def pool_spec(folder: Path, **engine_args: Any) -> ModelSpec:
    """The model in ``folder`` for an engine pool alone: what only schedulers go by is made up."""
    nbytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return ModelSpec(
        ModelName(folder.name), str(folder), 1.0, 0.1, nbytes, _SHAPE, 0, engine_args=tuple(engine_args.items())
    )


def _make(folder: Path) -> None:
    subprocess.run([sys.executable, str(_ROOT / "scripts/make_demo_models.py"), str(folder)], cwd=_ROOT, check=True)
