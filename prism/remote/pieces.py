"""Which piece of a model a parameter belongs to, by its name: 0 the embedding, 1..L the layers, L+1 norm and head."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDING: Final = "embed_tokens."


def layers_of(names: Iterable[str]) -> int:
    """How many decoder layers the parameters ``names`` make."""
    found = (_LAYER.search(name) for name in names)
    return max((int(m.group(1)) + 1 for m in found if m is not None), default=0)


def piece_of(name: str, layers: int) -> int:
    """The piece that the parameter ``name`` of a model with ``layers`` layers belongs to."""
    if (layer := _LAYER.search(name)) is not None:
        return int(layer.group(1)) + 1
    return 0 if _EMBEDDING in name else layers + 1
