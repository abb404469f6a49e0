"""Structured output: SGLang's xgrammar backend masks logits on GPUs only and raises elsewhere, and what xgrammar makes
of strings with a pattern or bounds is not always JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.json_strings import as_json_text


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


def compile_json(original: Callable[..., Any], self: Any, key_string: str) -> Any:
    """Around the backend's ``dispatch_json`` and ``dispatch_structural_tag``: with the schemas as xgrammar has to be
    told of them. What is no JSON is left to the original's words."""
    try:
        told = json.dumps(as_json_text(json.loads(key_string)))
    except (ValueError, RecursionError):
        told = key_string
    return original(self, told)


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
    *(
        Hook(
            f"{_XGRAMMAR}.XGrammarGrammarBackend.{name}",
            HookKind.AROUND,
            compile_json,
            ("self", "key_string"),
            "strings with a pattern or bounds may hold quotes and control characters, which is no JSON",
        )
        for name in ("dispatch_json", "dispatch_structural_tag")
    ),
)
