"""One request under way: collects its answer and ends as one record."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

from prism.trace.replay.answer import Answer
from prism.trace.replay.requests import Prepared
from prism.trace.report import RequestRecord

_DETAIL_CHARACTERS: Final = 200


class Flight:
    """An :class:`~prism.trace.replay.http.Exchange`. Calls ``on_done(flight, record)`` once."""

    __slots__ = ("_answer", "_error_body", "_keep_gaps", "_on_done", "_status", "_zero_s", "request", "sent_s")

    def __init__(
        self, request: Prepared, zero_s: float, keep_gaps: bool, on_done: Callable[[Flight, RequestRecord], None]
    ) -> None:
        self.request = request
        self.sent_s = perf_counter()
        self._zero_s, self._keep_gaps, self._on_done = zero_s, keep_gaps, on_done
        self._answer = Answer()
        self._status = 0
        self._error_body = b""

    def on_status(self, status: int) -> None:
        self._status = status

    def on_body(self, piece: bytes) -> None:
        if self._status == 200:
            self._answer.feed(piece, perf_counter())
        elif len(self._error_body) < 4096:
            self._error_body += piece

    def on_end(self) -> None:
        answer = self._answer
        if self._status != 200:
            self._finish(f"http_{self._status}", self._error_body.decode(errors="replace"))
        elif answer.error:
            self._finish("server", answer.error)
        elif not answer.done and answer.finish is None:
            self._finish("truncated", "the stream ended without a finish reason")
        elif not answer.events:
            self._finish("empty", "no token in the answer")
        else:
            self._finish("", "")

    def on_failure(self, kind: str, detail: str) -> None:
        self._finish(kind, detail)

    def _finish(self, error: str, detail: str) -> None:
        request, answer, now_s = self.request, self._answer, perf_counter()
        row, tokens, served = request.row, answer.tokens, answer.events > 0
        ttft_s = answer.first_s - self.sent_s if served else None
        tpot_s = (answer.last_s - answer.first_s) / (tokens - 1) if served and tokens > 1 else None
        record = RequestRecord(
            row=request.index,
            model=row.model,
            arrival_s=request.due_s,
            prompt_tokens=row.prompt_tokens or 0,
            output_tokens=tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=(answer.last_s if served else now_s) - self.sent_s,
            error=error,
            lag_s=self.sent_s - self._zero_s - request.due_s,
            slo_ttft_s=request.objective.ttft_s,
            slo_tpot_s=request.objective.tpot_s,
            gaps=answer.gaps if self._keep_gaps else {},
            max_gap_s=answer.most_gap_s,
            server_prompt_tokens=answer.prompt_tokens,
            detail=detail[:_DETAIL_CHARACTERS],
            asked_tokens=row.output_tokens if tokens != row.output_tokens else None,
        )
        self._on_done(self, record)
