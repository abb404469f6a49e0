"""Which piece of a model a parameter belongs to, by its name: 0 the embedding and what reads images, 1..L the layers,
L+1 norm and head."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDING: Final = "embed_tokens."
_ENDS: Final = re.compile(r"(?:^|\.)(?:embed_tokens|norm|ln_f|lm_head)\.")
"""Of what is in no layer, what no layer looks at."""
_ENCODER: Final = re.compile(
    r"(?:^|\.)(?:visual|vision_\w+|image_\w+|audio_\w+|multi_modal_projector|mm_projector)(?:\.|$)"
)
"""It has layers of its own."""


def reads_images(name: str) -> bool:
    """Whether the parameter ``name`` is of an encoder of images or sounds, or of what stands between it and the
    model."""
    return _ENCODER.search(name) is not None


def is_apart(name: str) -> bool:
    """Whether layers can run without the parameter ``name`` of no layer."""
    return reads_images(name) or _ENDS.search(name) is not None


def layers_of(names: Iterable[str]) -> int:
    """How many decoder layers the parameters ``names`` make."""
    found = (_LAYER.search(name) for name in names if not reads_images(name))
    return max((int(m.group(1)) + 1 for m in found if m is not None), default=0)


def piece_of(name: str, layers: int) -> int:
    """The piece that the parameter ``name`` of a model with ``layers`` layers belongs to."""
    if reads_images(name):
        return 0
    if (layer := _LAYER.search(name)) is not None:
        return int(layer.group(1)) + 1
    return 0 if _EMBEDDING in name else layers + 1
