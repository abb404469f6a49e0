"""One request of a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Rows of a trace come in order of ``arrival_s``, which counts from the start of the trace."""

    arrival_s: float
    model: str
    """Empty when the source has a single, unnamed model."""
    prompt_tokens: int | None
    """None when the source does not say."""
    output_tokens: int | None
    session: str | None = None
    """Requests with the same session continue one conversation."""
    prefix_hashes: tuple[int, ...] = ()
    """Ids of the prompt's blocks from its start (``TraceInfo.block_tokens`` each, the last may be partial): equal ids
    are equal text."""
