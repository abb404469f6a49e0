"""Ending requests that wait for a model, once until the inactive queue answers."""

from __future__ import annotations

from prism.core.effects import RefuseWaiting
from prism.core.reasons import Reason, ReasonCode
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import ModelRecord

_ANSWER_WITHIN_S = 1.0
"""How long requests that were refused may still be counted as waiting before they are refused again."""


def awaits_answer(model: ModelRecord, now_s: float) -> bool:
    """Its requests were refused, and the inactive queue has not said yet what is left."""
    return now_s < model.refused_at_s + _ANSWER_WITHIN_S


def refuse_waiting(
    outbox: EffectOutbox,
    model: ModelRecord,
    reason: Reason,
    retry_after_s: float | None,
    now_s: float,
    before_s: float | None = None,
) -> None:
    """End the model's waiting requests (those that came before ``before_s``)."""
    if model.waiting and not awaits_answer(model, now_s):
        model.refused_at_s = now_s
        detail = model.failure if reason.code is ReasonCode.ACTIVATION_FAILED else ""
        outbox.emit(RefuseWaiting(model.name, reason, retry_after_s, detail, before_s))
