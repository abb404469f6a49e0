"""What the sender is told: all that decides what is sent, when, and how it is judged. JSON, so that it can be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from prism.core.errors import InvalidValue

API_KEY_VARIABLE: Final = "PRISM_API_KEY"
"""The environment variable with the bearer token; it stands in no plan, report or command line."""


class Objective(msgspec.Struct, frozen=True):
    """What a model's requests are judged by; None: not judged."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def or_else(self, default: Objective) -> Objective:
        """With ``default`` for what is not judged here."""
        return Objective(
            default.ttft_s if self.ttft_s is None else self.ttft_s,
            default.tpot_s if self.tpot_s is None else self.tpot_s,
        )

    def scaled(self, factor: float) -> Objective:
        return Objective(
            self.ttft_s * factor if self.ttft_s is not None else None,
            self.tpot_s * factor if self.tpot_s is not None else None,
        )


class PromptSource(msgspec.Struct, frozen=True):
    """How prompts of one model are made. The server is to count ``fixed + per_word * words`` tokens."""

    tokenizer: str | None = None
    """Path of a ``tokenizer.json``; its vocabulary gives the words. None: common English words."""
    fixed: float = 0.0
    per_word: float = 1.0


class SendPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    trace: str
    trace_sha256: str
    steps: list[dict[str, Any]]
    """Transforms, as :func:`prism.trace.steps.apply_steps` takes them."""
    block_tokens: int
    url: str
    endpoint: str
    """``completions`` or ``chat``."""
    models: dict[str, str]
    """Model in the trace -> model that the server is asked for."""
    prompts: dict[str, PromptSource]
    """By model in the trace."""
    objectives: dict[str, Objective]
    ignore_eos: bool = True
    """Ask for exactly the trace's number of tokens (an extension that SGLang, vLLM and Prism know)."""
    extra: dict[str, Any] = {}
    """Added to every request's body."""
    seed: int = 0
    timeout_s: float = 600.0
    most_connections: int = 10_000
    keep_gaps: bool = True
    limit: int | None = None
    """Only so many of the first requests."""
    id_prefix: str = "replay"

    def fingerprint(self) -> str:
        """The same for plans that send the same: guards resuming."""
        same = msgspec.structs.replace(self, trace="", url="", timeout_s=0.0, most_connections=0)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(same, order="deterministic"))


def read_objectives(path: Path) -> dict[str, Objective]:
    """Objectives from ``{"models": {NAME: {"ttft_s": .., "tpot_s": ..}}}``, as ``prism replay --calibrate`` writes
    them. Raises :class:`InvalidValue` naming the file."""

    class File(msgspec.Struct):
        models: dict[str, Objective]

    try:
        return msgspec.json.decode(path.read_bytes(), type=File).models
    except (OSError, msgspec.DecodeError) as exc:
        raise InvalidValue("slo", str(path), f"is no file of objectives: {exc}") from exc
