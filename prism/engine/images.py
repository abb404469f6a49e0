"""The names under which engines keep their parameters in the store, known without starting one."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from prism.weights.packs.format import PackKey


def layout_name(sglang_version: str, world: int, rank: int, dtype: str) -> str:
    """The pack layout of an engine: parameters as they lie in SGLang ``sglang_version`` on rank ``rank`` of
    ``world``."""
    return f"sglang-{re.sub(r'[^0-9A-Za-z.]', '', sglang_version)}/tp{world}/rank{rank}/{dtype}"


def image_keys(mark: str, world: int, arguments: dict[str, Any]) -> tuple[PackKey, ...]:
    """The packs of every rank of an engine for the model with fingerprint ``mark``, which is started with the
    ``ServerArgs`` keywords ``arguments``."""
    dtype = str(arguments.get("dtype", "auto"))
    return tuple(PackKey(mark, layout_name(version("sglang"), world, rank, dtype)) for rank in range(world))
