"""A decoded token sees as much of its window as it does when it is part of a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.rig import codec

pytestmark = pytest.mark.engine
BEFORE = 31


def back_end(told: int | None, *layers: int) -> Any:
    """What SGLang makes of a model that names a window of ``told`` and has layers with these."""
    codec()
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_patches.windows import count_current

    made = (RadixAttention(1, 8, 1.0, 1, layer_id=i, sliding_window_size=size) for i, size in enumerate(layers))
    found = SimpleNamespace(sliding_window_size=told)
    count_current(None, found, SimpleNamespace(model=torch.nn.ModuleList(made)))
    return found


def seen(back_end: Any, decode: bool) -> int:
    from sglang_patches.windows import prepare

    sizes: list[int] = []
    mode = SimpleNamespace(is_decode_or_idle=lambda: decode)
    prepare(lambda end, _: sizes.append(end.sliding_window_size), back_end, SimpleNamespace(forward_mode=mode))
    return sizes[0]


@pytest.mark.parametrize("told", [BEFORE, BEFORE + 1], ids=["most-models", "laguna"])
def test_the_current_token_counts_in_decoding_only(told: int) -> None:
    found = back_end(told, -1, BEFORE, BEFORE)
    assert seen(found, decode=True) == BEFORE + 1
    assert seen(found, decode=False) == BEFORE
    assert found.sliding_window_size == BEFORE + 1, "buffers of graphs hold what decoding sees"


def test_models_without_windows_are_left_as_they_are() -> None:
    found = back_end(8192, -1, -1)
    assert seen(found, decode=True) == seen(found, decode=False) == 8192


def test_where_sglang_prepares_no_windows_there_are_none() -> None:
    """Cohere-2: its layers have windows and it does not say so."""
    found = back_end(None, -1, BEFORE)
    assert found.sliding_window_size is None and found.prism_window is None
