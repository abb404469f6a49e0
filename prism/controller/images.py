"""What the engines of a model will look for in the store, read when the model is first needed.

Decisions do no I/O: the configuration on disk and SGLang's version enter the names of images here, off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prism.core.errors import InvalidValue
from prism.core.specs import DeviceKind, ModelSpec
from prism.engine.images import image_keys
from prism.engine.sglang_args import server_arguments
from prism.weights.packs.format import PackKey


@dataclass(frozen=True, slots=True)
class ModelImages:
    """``mark`` is the fingerprint of the model's weights; "": nobody knows it, and nothing can be found by it."""

    mark: str = ""
    by_kind: Mapping[DeviceKind, tuple[PackKey, ...]] = field(default_factory=dict)
    """One per rank; none for settings that no engine takes (the engine says so)."""
    layers: int = 0
    """Of the model."""


def read_images(spec: ModelSpec, mark: str) -> ModelImages:
    """Reads the model's configuration: not for the event loop."""
    by_kind = {kind: _keys(spec, mark, kind) for kind in DeviceKind} if mark else {}
    return ModelImages(mark, by_kind, spec.shape.layers)


def _keys(spec: ModelSpec, mark: str, kind: DeviceKind) -> tuple[PackKey, ...]:
    try:
        return image_keys(mark, spec.tp, server_arguments(spec, kind))
    except InvalidValue:
        return ()
