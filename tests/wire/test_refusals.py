"""What clients are told when a scheduler refuses."""

from __future__ import annotations

import re

import pytest

from prism.core.ids import ModelName
from prism.core.reasons import Reason, ReasonCode, because
from prism.wire.refusals import error_type, refusal_of

GIB = 1 << 30
REFUSALS = [
    because(ReasonCode.PROMPT_TOO_LARGE, tokens=900, room_tokens=500),
    because(ReasonCode.LATE_REJECTED, slack_s=-1.0, prefill_s=0.5, work_s=3.0),
    because(ReasonCode.QUEUE_FULL, queued=7, work_s=3.0),
    because(ReasonCode.QUEUE_FULL, waiting=7, bound=7),
    because(ReasonCode.UNKNOWN_MODEL),
    because(ReasonCode.NO_FEASIBLE_DEVICE, weight_bytes=30 * GIB, min_kv_bytes=GIB, largest_device_bytes=24 * GIB),
    because(ReasonCode.NO_FEASIBLE_DEVICE, need_bytes=31 * GIB, largest_device_bytes=24 * GIB),
    because(ReasonCode.NOT_PLACED),
    because(ReasonCode.NO_ROOM, waiting=3, waited_s=60.0),
    because(ReasonCode.NO_DEVICES),
    because(ReasonCode.ACTIVATION_FAILED, failures=3, error="engine_died: RuntimeError: no logits"),
]


@pytest.mark.parametrize("reason", REFUSALS, ids=str)
def test_a_refusal_is_a_sentence_without_a_schedulers_terms(reason: Reason) -> None:
    told = refusal_of(ModelName("team/m"), reason)
    assert told.message.startswith("The ") or told.message[0] in "'No0123456789"
    assert "'team/m'" in told.message
    assert not re.search(r"\w+=\S|_bytes|_s\b|\bnow\b", told.message)
    assert told.status in (400, 404, 429, 503)


def test_sizes_and_the_engines_words_are_told() -> None:
    assert "31 GiB, the largest has 24 GiB" in refusal_of(ModelName("m"), REFUSALS[5]).message
    assert refusal_of(ModelName("m"), REFUSALS[-1], "no weights").message.endswith("no weights")
    told = refusal_of(ModelName("m"), REFUSALS[0], "its KV is quantised").message
    assert "900" in told and "500" in told and told.endswith("Larger ones are not served here: its KV is quantised.")


@pytest.mark.parametrize(
    ("status", "type"),
    [(400, "invalid_request_error"), (404, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_error_types(status: int, type: str) -> None:
    assert error_type(status) == type
