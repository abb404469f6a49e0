"""What is kept of a finished request: one log line, and the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.obs import names
from prism.obs.metrics import Metrics
from prism.server.errors import ApiError
from prism.server.objectives import Objectives
from prism.server.stream import RequestStream
from prism.server.usage import Usage

log = logging.getLogger("prism.access")

QUOTING: Final = frozenset({400, 404, 422})
"""Errors of these kinds quote what the client sent."""


@dataclass(slots=True)
class Record:
    """One HTTP request for tokens, as far as it is known."""

    request_id: str
    route: str
    arrival_s: float
    key: str = ""
    client_id: str = ""
    """``x-client-request-id``, if the client sent one."""
    model: str = ""
    objectives: Objectives | None = None
    streams: Sequence[RequestStream] = ()
    streaming: bool = False
    prompt: object = None
    """Messages or prompt, kept only when the catalog says ``log.prompts``."""
    words: bool = False
    """The catalog says ``log.prompts``."""
    error: ApiError | None = None
    cancelled: bool = False

    @property
    def outcome(self) -> str:
        if self.cancelled or (self.error is not None and self.error.code == "cancelled"):
            return "cancelled"
        if self.error is None:
            return "ok"
        if self.error.status == 429:
            return "rejected"
        return "failed" if self.error.status >= 500 else "invalid"


class Recorder:
    """Writes records down; cheap enough for every request."""

    def __init__(self, metrics: Metrics, usage: Usage) -> None:
        self._metrics, self._usage = metrics, usage

    def ended(self, record: Record) -> None:
        """Counts and logs ``record``."""
        now_s = time.time()
        first = record.streams[0] if record.streams else None
        device = first.device if first is not None else ""
        metrics = self._metrics
        if record.model:
            self._usage.of(record.model).last_used_s = now_s
            metrics.inc(names.REQUESTS, model=record.model, device=device, outcome=record.outcome)
        for stream in record.streams:
            self._stream(stream, record, device)
        if record.outcome == "ok" and record.streams:
            metrics.observe(names.E2E_SECONDS, now_s - record.arrival_s, model=record.model, device=device)
        generated = sum(len(stream.log.tokens) for stream in record.streams)
        if record.key:
            metrics.inc(names.KEY_REQUESTS, key=record.key)
            prompt = first.prompt_tokens if first is not None else 0
            metrics.inc(names.KEY_TOKENS, generated + prompt, key=record.key)
        if log.isEnabledFor(logging.INFO):
            log.info("request", extra=_fields(record, device, generated, now_s))

    def _stream(self, stream: RequestStream, record: Record, device: str) -> None:
        model, metrics = record.model, self._metrics
        metrics.inc(names.PROMPT_TOKENS, stream.prompt_tokens, model=model)
        if stream.cached_tokens:
            metrics.inc(names.CACHED_TOKENS, stream.cached_tokens, model=model)
        tokens = len(stream.log.tokens)
        if stream.first_token_s is None or stream.last_token_s is None or record.objectives is None:
            return
        metrics.inc(names.GENERATED_TOKENS, tokens, model=model)
        ttft_s = stream.first_token_s - stream.arrival_s
        metrics.observe(names.TTFT_SECONDS, ttft_s, model=model, device=device)
        met, use = ttft_s <= record.objectives.slo_ttft_s, self._usage.of(model)
        use.ttft_met += met
        use.ttft_missed += not met
        self._slo("ttft", met, model, device)
        if stream.finished and tokens > 1:
            tpot_s = (stream.last_token_s - stream.first_token_s) / (tokens - 1)
            metrics.observe(names.TPOT_SECONDS, tpot_s, model=model, device=device)
            met = tpot_s <= record.objectives.slo_tpot_s
            use.tpot_met += met
            use.tpot_missed += not met
            self._slo("tpot", met, model, device)

    def _slo(self, objective: str, met: bool, model: str, device: str) -> None:
        self._metrics.inc(names.SLO, model=model, device=device, objective=objective, met=str(met).lower())


def _fields(record: Record, device: str, generated: int, now_s: float) -> dict[str, object]:
    first = record.streams[0] if record.streams else None
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "route": record.route,
        "model": record.model,
        "outcome": record.outcome,
        "seconds": round(now_s - record.arrival_s, 4),
    }
    if first is not None:
        fields |= {"device": device, "prompt_tokens": first.prompt_tokens, "tokens": generated}
        fields |= {"choices": len(record.streams), "stream": record.streaming}
        if first.first_token_s is not None:
            fields["ttft_s"] = round(first.first_token_s - record.arrival_s, 4)
        if (attempts := max(s.log.attempt for s in record.streams)) > 1:
            fields["attempts"] = attempts
    if record.prompt is not None:
        fields |= {"prompt": record.prompt, "answers": [stream.text for stream in record.streams]}
    if record.key:
        fields["key"] = record.key
    if record.client_id:
        fields["client_request_id"] = record.client_id
    if record.error is not None:
        fields |= {"status": record.error.status, "code": record.error.code}
        if record.words or record.error.status not in QUOTING:
            fields["error"] = record.error.message[:300]
    return fields
