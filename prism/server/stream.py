"""One request on its way: what the client is still to be told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from prism.core.ids import ModelName
from prism.server.errors import ApiError
from prism.server.token_log import Fresh, TokenLog
from prism.wire import keys
from prism.wire.messages import Submission

_DEVICE_QUEUE: Final = keys.device_queue("")


class Sink(Protocol):
    """Turns tokens into text. One per model, so that one message's tokens of all its requests are decoded together."""

    def deliver(self, batch: Sequence[tuple[RequestStream, Fresh, bytes]]) -> None:
        """``(stream, fresh tokens, extra)`` of different requests; appends to the streams and wakes their readers."""

    def forget(self, stream: RequestStream) -> None:
        """The stream ended early; drop what is kept for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands that has no token yet. ``state``: ``waiting_for_model``, ``loading`` (its model), or
    ``queued`` (on a device that has its model)."""

    state: str
    position: int | None
    """Requests before it in its queue, those that run included (:meth:`prism.store.interface.Queues.position`)."""
    note: str = ""
    """While the model is loading: where, and why."""


@dataclass(slots=True, eq=False)
class RequestStream:
    """Shared by the broker, which feeds it, and the response, which reads it; both in one event loop.

    Nothing queues up here when a client reads slowly: the text is kept once, and a reader that was away finds all of
    it.
    """

    id: str
    model: ModelName
    sink: Sink
    wake: asyncio.Event
    """Set when a reader has something to do; shared by the choices of one HTTP request."""
    streaming: bool
    prompt_tokens: int
    prompt_tail: list[int]
    max_new_tokens: int
    arrival_s: float
    stop: tuple[str, ...] = ()
    decoding: tuple[bool, bool, bool] = (True, True, False)
    """SGLang's skip_special_tokens, spaces_between_special_tokens, no_stop_trim."""
    grammar: str | None = None
    """The field of the request that says what the answer looks like, for errors."""
    log: TokenLog = field(default_factory=TokenLog)
    text: str = ""
    shown: int = -1
    """Characters of it the reader has; -1: it has not looked yet."""
    dirty: bool = False
    """Something changed since the reader last looked."""
    error: ApiError | None = None
    progress: Progress | None = None
    """Looked up for clients that want to know (:mod:`prism.server.following`)."""
    vector: bytes = b""
    """The answer of a model that generates nothing (:func:`prism.engine.sglang_codec.pack_vector`)."""
    logprobs: Any = None
    """SGLang's accumulators, when log-probabilities are wanted."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    queue: str = ""
    ran_on: str = ""
    """The device that sent its first token, when it began in the inactive queue."""
    queued: bool = False
    """The store has taken it."""
    released: bool = False
    missing_since_s: float | None = None
    """When the store was first found not to have it any more."""

    @property
    def device(self) -> str:
        """Where it runs; empty while it waits for its model."""
        if self.ran_on:
            return self.ran_on
        return self.queue.removeprefix(_DEVICE_QUEUE) if self.queue.startswith(_DEVICE_QUEUE) else ""

    @property
    def finished(self) -> bool:
        return self.log.finish is not None

    @property
    def ended(self) -> bool:
        return self.log.finish is not None or self.error is not None

    @property
    def visible(self) -> str:
        """The text a client may see now: an end that may become a stop string is held back."""
        if not self.stop or self.finished:
            return self.text
        held = held_back(self.text, self.stop)
        return self.text[:-held] if held else self.text

    def touched(self, now_s: float | None = None) -> None:
        """Tokens arrived; wakes the reader when it cares."""
        now_s = time.time() if now_s is None else now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.dirty = True
        if self.streaming or self.ended:
            self.wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with ``error``; later ones are ignored."""
        if not self.ended:
            self.error = error
            self.wake.set()


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``stops`` without completing it."""
    longest = max(len(stop) for stop in stops) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return size
    return 0


def submission_of(stream: RequestStream, front: str, spec: Any, payload: bytes) -> Submission:
    """The queue entry of ``stream``. ``spec`` has the model's objectives (:class:`prism.server.models.Objectives`)."""
    return Submission(
        id=stream.id,
        model=stream.model,
        front=front,
        arrival_s=stream.arrival_s,
        prompt_tokens=stream.prompt_tokens,
        max_new_tokens=stream.max_new_tokens,
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        max_wait_s=spec.max_wait_s,
        late=spec.late,
        payload=payload,
    )
