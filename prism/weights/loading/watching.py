"""How a load is watched and stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prism.weights.packs.format import BlockEntry

OnBlock = Callable[[int, BlockEntry], None]


class CancelFlag(Protocol):
    """``threading.Event`` or anything that answers ``is_set``."""

    def is_set(self) -> bool: ...


class Never:
    """The cancel event of a load that nobody cancels."""

    def is_set(self) -> bool:
        return False
