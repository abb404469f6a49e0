"""How many tokens a sliding window shows: as many when a token is decoded as when it is part of a prompt.

SGLang's layers are told how many tokens *before* the current one they see, W. Its prefill kernels and its other back
ends go by that (W + 1 tokens, Hugging Face's ``sliding_window``); Triton's decoding lets ``min(length, n)`` tokens be
read, of which the current one is the last, and most models tell it n = W::

    prompt     | . . o o o o x |     W + 1
    decoding   | . . . o o o x |     n = W: one less

A request that was retracted or goes on in another engine has its decoded tokens in a prompt, so that its answer
changed. Here n is W + 1 for decoding, and W for the part of a prompt that is there already: what lies before it may
have left the window, and its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_patches.hooks import Hook, HookKind


def layers_window(model: Any) -> int | None:
    """W of the widest windows; None: no layer has one."""
    from sglang.srt.layers.radix_attention import RadixAttention

    sizes = [module.sliding_window_size for module in model.modules() if isinstance(module, RadixAttention)]
    return max((int(size) for size in sizes if size > 0), default=None)


def count_current(result: None, back_end: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """After ``TritonAttnBackend.__init__``: n by the layers, with the current token."""
    told = back_end.sliding_window_size  # some models tell SGLang of none, and it prepares nothing for their layers'
    back_end.prism_window = None if told is None else layers_window(model_runner.model)
    if back_end.prism_window is not None:
        back_end.sliding_window_size = back_end.prism_window + 1


def prepare(original: Callable[..., None], back_end: Any, forward_batch: Any) -> None:
    """Around ``TritonAttnBackend.init_forward_metadata``."""
    if forward_batch.forward_mode.is_decode_or_idle():
        original(back_end, forward_batch)
        return
    with _tokens_before(back_end):
        original(back_end, forward_batch)


@contextmanager
def _tokens_before(back_end: Any) -> Iterator[None]:
    """What a prompt's first new token sees of the tokens that are there."""
    counted, back_end.sliding_window_size = back_end.sliding_window_size, _before(back_end)
    try:
        yield
    finally:
        back_end.sliding_window_size = counted


def _before(back_end: Any) -> int | None:
    own: int | None = back_end.prism_window
    size: int | None = back_end.sliding_window_size
    return size if own is None else own


_TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
HOOKS = (
    Hook(
        f"{_TRITON}.__init__",
        HookKind.AFTER,
        count_current,
        ("self", "model_runner", "skip_prefill", "kv_indptr_buf"),
        "windows of decoding are those of prompts",
    ),
    Hook(
        f"{_TRITON}.init_forward_metadata",
        HookKind.AROUND,
        prepare,
        ("self", "forward_batch"),
        "a prompt reads nothing of what has left its window",
    ),
)
