"""The requests inside one engine: whose they are, where their numbering stands, and what to say about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prism.engine.commands import Report, Submit
from prism.engine.delivery import Delivery
from prism.engine.events import Accepted, AttemptFinished, AttemptFirstToken, Lost
from prism.engine.sglang_codec import pack_extra, pack_vector
from prism.wire.messages import TokenItem, Tokens, encode


@dataclass(slots=True)
class Tracked:
    """One request of this engine."""

    front: str
    attempt: int
    resumed: tuple[int, ...]
    taken_s: float
    """Monotonic time at which the engine took it in."""
    sent: int
    """Generated tokens delivered so far, earlier attempts included."""
    announced: bool = False


class Tracker:
    """Splits the engine's outputs by front door, delivers them, and reports the requests' milestones.

    ``report`` sends one report to the pool. After a failed delivery ``lost`` holds the ids to abort in the scheduler.
    """

    def __init__(self, engine: str, delivery: Delivery, report: Callable[[Report], None]) -> None:
        self._engine, self._delivery, self._report = engine, delivery, report
        self._requests: dict[str, Tracked] = {}
        self.lost: list[str] = []

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        return list(self._requests)

    def resumed(self, rid: str) -> tuple[int, ...]:
        found = self._requests.get(rid)
        return found.resumed if found else ()

    def take(self, work: Submit) -> None:
        """A new attempt is here."""
        self._requests[work.rid] = Tracked(
            front=work.front,
            attempt=work.attempt,
            resumed=tuple(work.resumed),
            taken_s=time.monotonic(),
            sent=len(work.resumed),
        )
        self._report(Accepted(rid=work.rid))

    def deliver(self, batch: Any, prefill_of: Callable[[str], tuple[float, float]]) -> None:
        """Send the outputs of one step (SGLang's ``BatchTokenIDOutput``). ``prefill_of(rid)`` gives queued and prefill
        seconds of a request that has its first token."""
        now_s = time.time()
        by_front: dict[str, list[TokenItem]] = {}
        for row, rid in enumerate(batch.rids):
            found = self._requests.get(rid)
            if found is None:
                continue
            if not found.announced and len(batch.output_ids[row]):
                self._announce(rid, found, batch, row, prefill_of)
            by_front.setdefault(found.front, []).append(self._item(rid, found, batch, row, now_s))
        for front, items in by_front.items():
            self._send(front, items)

    def deliver_vectors(self, batch: Any, prefill_of: Callable[[str], tuple[float, float]]) -> None:
        """Send the finished rows of one step (SGLang's ``BatchEmbeddingOutput``): one item each, without tokens. What
        the pool keeps to send again is the row alone, since a step has many and each may be large."""
        now_s = time.time()
        by_front: dict[str, list[TokenItem]] = {}
        for row, rid in enumerate(batch.rids):
            if (found := self._requests.get(rid)) is None:
                continue
            finish = batch.finished_reasons[row]
            extra = b""
            if finish["type"] != "abort":
                self._announce(rid, found, batch, row, prefill_of)
                extra = pack_vector(batch.embeddings[row])
            cached = batch.cached_tokens[row]
            item = TokenItem(rid, found.attempt, found.sent, [], finish, cached, now_s, extra)
            by_front.setdefault(found.front, []).append(item)
        for front, items in by_front.items():
            if self._delivery.send(front, self._engine, items) is None:
                self._lose(items)
                continue
            for item in items:
                self._close(item, encode(Tokens(engine=self._engine, items=[item])))

    def fail(self, rid: str, message: str, status: int) -> None:
        """End a request with an error of its own."""
        finish = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        self.finish(rid, finish)

    def finish(self, rid: str, finish: dict[str, object]) -> None:
        """End a request that makes no more output."""
        found = self._requests.get(rid)
        if found is None:
            return
        item = TokenItem(
            id=rid,
            attempt=found.attempt,
            start=found.sent,
            token_ids=[],
            finish=finish,
            cached_tokens=0,
            engine_time_s=time.time(),
            extra=b"",
        )
        self._send(found.front, [item])

    def clear(self) -> list[str]:
        """Forget all requests; returns their ids."""
        ids = self.ids()
        self._requests.clear()
        return ids

    def _announce(
        self, rid: str, found: Tracked, batch: Any, row: int, prefill_of: Callable[[str], tuple[float, float]]
    ) -> None:
        found.announced = True
        queued_s, prefill_s = prefill_of(rid)
        self._report(
            AttemptFirstToken(
                rid=rid,
                prompt_tokens=batch.prompt_tokens[row],
                cached_tokens=batch.cached_tokens[row],
                prefill_s=prefill_s,
                queued_s=queued_s,
            )
        )

    def _item(self, rid: str, found: Tracked, batch: Any, row: int, now_s: float) -> TokenItem:
        start, tokens = found.sent, list(batch.output_ids[row])
        found.sent += len(tokens)
        return TokenItem(
            id=rid,
            attempt=found.attempt,
            start=start,
            token_ids=tokens,
            finish=batch.finished_reasons[row],
            cached_tokens=batch.cached_tokens[row],
            engine_time_s=now_s,
            extra=pack_extra(batch, row),
        )

    def _send(self, front: str, items: Sequence[TokenItem]) -> None:
        data = self._delivery.send(front, self._engine, list(items))
        if data is None:
            self._lose(items)
            return
        for item in items:
            if item.finish is not None:
                self._close(item, data)

    def _close(self, item: TokenItem, data: bytes) -> None:
        found = self._requests.pop(item.id)
        assert item.finish is not None
        self._report(
            AttemptFinished(
                rid=item.id,
                attempt=found.attempt,
                reason=str(item.finish.get("type", "abort")),
                total_tokens=found.sent,
                final=data,
            )
        )

    def _lose(self, items: Iterable[TokenItem]) -> None:
        for item in items:
            found = self._requests.pop(item.id)
            if item.finish is None:
                self.lost.append(item.id)
            self._report(
                Lost(rid=item.id, attempt=found.attempt, reason="the front door's mailbox takes no more output")
            )
