"""Inputs for models that answer with a vector or scores: tokenised, queued one by one, collected again.

Each input is a request of its own to the schedulers: the batch an engine makes of them is the engine's business, and an
engine that dies takes only those with it that it had not answered.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from prism.engine.sglang_codec import encode_request, unpack_vector
from prism.server.demand import CHARS_PER_TOKEN, Demand
from prism.server.errors import input_too_long
from prism.server.sglang_manager import LONG_TEXT_CHARS, Call, FrontManager
from prism.server.stream import RequestStream, submission_of
from prism.server.token_log import Fresh

AT_ONCE: Final = 32
"""Inputs of one request that are on their way into the queue together."""

Rows = list[str] | list[list[int]] | list[tuple[str, str]]


@dataclass(slots=True)
class PooledInputs:
    """What one HTTP request wants answered: texts, lists of token ids, or pairs of texts."""

    rows: Rows
    param: str
    dimensions: int | None = None
    prism_call: Call | None = None


@dataclass(frozen=True, slots=True)
class _Tokens:
    ids: list[int]
    types: list[int] | None = None
    """Which text of a pair each token belongs to, for models that look at it."""


class VectorSink:
    """The :class:`prism.server.stream.Sink` of answers that are no text."""

    def deliver(self, batch: Sequence[tuple[RequestStream, Fresh, bytes]]) -> None:
        for stream, fresh, extra in batch:
            if fresh.finish is not None:
                stream.vector = unpack_vector(extra)

    def forget(self, stream: RequestStream) -> None:
        return None


class PooledQueue:
    """The way of one model's inputs to its engines and back."""

    def __init__(self, manager: FrontManager) -> None:
        self._manager = manager
        self._sink = VectorSink()
        self._params = SamplingParams(max_new_tokens=0)
        self._params.normalize(manager.tokenizer)

    def demand(self, inputs: PooledInputs, exact: bool) -> Demand:
        """Tokens it may use; texts are estimated, or counted."""
        if exact:
            sizes = [len(row.ids) for row in self._tokenize(inputs.rows)]
        else:
            sizes = [_estimate(row) for row in inputs.rows]
        return Demand(sum(sizes), 0, len(sizes), chosen=True)

    async def submit(self, inputs: PooledInputs, call: Call) -> None:
        """Queues all inputs. Raises :class:`ApiError`; what was queued then is the caller's to abandon."""
        if sum(_chars(row) for row in inputs.rows) > LONG_TEXT_CHARS:
            rows = await asyncio.to_thread(self._tokenize, inputs.rows)
        else:
            rows = self._tokenize(inputs.rows)
        for row in rows:
            self._check(row, inputs.param)
        call.streams += [self._stream(row, call, index) for index, row in enumerate(rows)]
        try:
            async with asyncio.TaskGroup() as group:
                for start in range(min(AT_ONCE, len(rows))):
                    group.create_task(self._queue(rows, inputs, call, start))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        call.submitted = True

    async def answers(self, call: Call) -> list[bytes]:
        """The values for each input, in order. Raises the :class:`ApiError` of the first that failed."""
        await self._manager.all_ended(call)
        return [stream.vector for stream in call.streams]

    def _tokenize(self, rows: Rows) -> list[_Tokens]:
        if not isinstance(rows[0], str | tuple):
            return [_Tokens(list(row)) for row in rows]
        tokenizer = self._manager.tokenizer
        if isinstance(rows[0], tuple):
            found = tokenizer(*map(list, zip(*rows, strict=True)), return_token_type_ids=True)
        else:
            found = tokenizer(rows)
        types = (isinstance(rows[0], tuple) and found.get("token_type_ids")) or [None] * len(rows)
        return [_Tokens(ids, kinds) for ids, kinds in zip(found["input_ids"], types, strict=True)]

    def _check(self, row: _Tokens, param: str) -> None:
        limit = self._manager.context_len - 1  # SGLang keeps room for a token that nobody asks for
        if len(row.ids) > limit:
            raise input_too_long(limit, len(row.ids), param)
        self._manager.check_ids(row.ids, param)

    def _stream(self, row: _Tokens, call: Call, index: int) -> RequestStream:
        return RequestStream(
            id=f"{call.request_id}-{index:03d}",
            model=self._manager.prism_model,
            sink=self._sink,
            wake=call.wake,
            streaming=False,
            prompt_tokens=len(row.ids),
            prompt_tail=[],
            max_new_tokens=1,  # the answer, for schedulers that reckon with tokens
            arrival_s=call.arrival_s,
        )

    async def _queue(self, rows: Sequence[_Tokens], inputs: PooledInputs, call: Call, start: int) -> None:
        broker = self._manager.broker
        for stream, row in list(zip(call.streams, rows, strict=True))[start::AT_ONCE]:
            payload = encode_request(self._request(stream.id, row, inputs.dimensions, call.adapter))
            await broker.submit(stream, submission_of(stream, broker.inbox.address, call.objectives, payload))

    def _request(
        self, rid: str, row: _Tokens, dimensions: int | None, adapter: str | None
    ) -> TokenizedEmbeddingReqInput:
        return TokenizedEmbeddingReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", row.ids),
            mm_inputs=None,
            token_type_ids=row.types,
            sampling_params=self._params,
            dimensions=dimensions,
            lora_id=adapter,
        )


def _chars(row: Any) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row)) if isinstance(row, tuple) else 0


def _estimate(row: Any) -> int:
    return len(row) if isinstance(row, list) else _chars(row) // CHARS_PER_TOKEN + 1
