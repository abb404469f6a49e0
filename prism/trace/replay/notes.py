"""What a reader must know to trust the numbers of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.report import RequestRecord

LATE_S: Final = 0.010
"""A send later than this is late; a run with more than 1% of them is said to have fallen behind."""


def run_notes(plan: SendPlan, records: Sequence[RequestRecord], segments: int, interrupted: bool) -> list[str]:
    """Sentences for the report; none when there is nothing to say."""
    return [*_sending(records), *_course(segments, interrupted), *_objectives(plan), *_lengths(records)]


def _sending(records: Sequence[RequestRecord]) -> list[str]:
    late = sum(r.lag_s > LATE_S for r in records)
    if late <= 0.01 * len(records):
        return []
    return [
        f"The sender could not keep up: {late} of {len(records)} requests were sent more than "
        f"{LATE_S * 1000:.0f} ms late (the latest {max(r.lag_s for r in records) * 1000:.0f} ms)."
    ]


def _course(segments: int, interrupted: bool) -> list[str]:
    notes = []
    if segments > 1:
        notes.append(
            f"The replay was interrupted and resumed: {segments} segments. Models' states between them differ."
        )
    if interrupted:
        notes.append("The replay was interrupted before its end.")
    return notes


def _objectives(plan: SendPlan) -> list[str]:
    """Attainment means little where there is nothing to attain."""
    without = [name for name in plan.models if plan.objectives.get(name, Objective()) == Objective()]
    if not without:
        return []
    who = "The models have" if len(without) == len(plan.models) else f"{', '.join(without)}: these models have"
    return [f"{who} no objective: every request that was answered counts as having met it."]


def _lengths(records: Sequence[RequestRecord]) -> list[str]:
    notes = []
    wrong = [r for r in records if r.server_prompt_tokens is not None and r.server_prompt_tokens != r.prompt_tokens]
    if wrong:
        worst = max(abs((r.server_prompt_tokens or r.prompt_tokens) - r.prompt_tokens) for r in wrong)
        notes.append(
            f"The server counted other prompt lengths than the trace's for {len(wrong)} requests (by {worst} at most)."
        )
    short = [r for r in records if r.asked_tokens is not None and not r.error]
    if short:
        notes.append(
            f"{len(short)} complete answers had another number of tokens than the trace "
            f"({sum(r.output_tokens for r in short)} instead of {sum(r.asked_tokens or 0 for r in short)} in all)."
        )
    return notes
