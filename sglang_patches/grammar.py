"""Structured output on the CPU: SGLang's xgrammar backend masks logits on GPUs only and raises elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind


def apply_mask(original: Callable[..., Any], self: Any, logits: Any, vocab_mask: Any) -> None:
    """Around ``XGrammarGrammar.apply_vocab_mask`` and the backend's: xgrammar's own CPU kernel for CPU logits."""
    _mask(lambda: original(self, logits, vocab_mask), logits, vocab_mask)


def apply_mask_static(original: Callable[..., Any], logits: Any, vocab_mask: Any) -> None:
    """As :func:`apply_mask`, for the static method of the backend."""
    _mask(lambda: original(logits, vocab_mask), logits, vocab_mask)


def _mask(original: Callable[[], Any], logits: Any, vocab_mask: Any) -> None:
    if logits.device.type != "cpu":
        original()
        return
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"
HOOKS = (
    Hook(
        f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask",
        HookKind.AROUND,
        apply_mask,
        ("self", "logits", "vocab_mask"),
        "the original raises for CPU logits and ends the engine",
    ),
    Hook(
        f"{_XGRAMMAR}.XGrammarGrammarBackend.apply_vocab_mask",
        HookKind.AROUND,
        apply_mask_static,
        ("logits", "vocab_mask"),
        "the original raises for CPU logits and ends the engine",
    ),
)
