"""From an exception during activation to the cause the node agent acts on."""

from __future__ import annotations

import json

from prism.engine.errors import ActivationCause
from prism.memory.errors import causes, is_out_of_memory

_CORRUPT_HINTS = (
    "safetensor",
    "header",
    "deserializ",
    "size mismatch",
    "must match the size",
    "shape",
    "weight",
    "config.json",
    "not valid JSON",
    "tokenizer",
)


def diagnose(error: BaseException) -> tuple[str, str]:
    """``(ActivationCause, detail)`` for ``error``; the detail is one line."""
    detail = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return _cause(error).value, detail


def _cause(error: BaseException) -> ActivationCause:
    errors = list(causes(error))
    names = {type(e).__name__ for e in errors}
    if names & {"UnsupportedModel"}:
        return ActivationCause.UNSUPPORTED
    if is_out_of_memory(error):
        return ActivationCause.OUT_OF_MEMORY
    if any(isinstance(e, FileNotFoundError | NotADirectoryError) for e in errors):
        return ActivationCause.MISSING
    text = " ".join(str(e) for e in errors)
    if "Cannot find any model weights" in text or "does not appear to have a file named" in text:
        return ActivationCause.MISSING
    if "not supported" in text or "are not supported" in text or "Cannot find model module" in text:
        return ActivationCause.UNSUPPORTED
    if names & {"SafetensorError", "CorruptBlock", "BadPack", "BadModelFolder", "WeightsError"}:
        return ActivationCause.CORRUPT
    if any(isinstance(e, json.JSONDecodeError | UnicodeDecodeError) for e in errors):
        return ActivationCause.CORRUPT
    if any(isinstance(e, ValueError | KeyError | RuntimeError | AssertionError | OSError) for e in errors) and any(
        hint in text for hint in _CORRUPT_HINTS
    ):
        return ActivationCause.CORRUPT
    return ActivationCause.INTERNAL
