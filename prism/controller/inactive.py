"""The inactive queue: requests for models that are on no device. They wait here until their model has a route."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from prism.core.events import WaitingRequests
from prism.core.ids import DeviceId, ModelName
from prism.store.ledger import Ledger
from prism.store.values import Entry
from prism.wire import keys
from prism.wire.mailbox import Outbox
from prism.wire.messages import Failed, Submission, encode
from prism.wire.refusals import error_type


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the clients of refused requests are told."""

    status: int
    code: str
    message: str
    retry_after_s: float | None


class InactiveQueue:
    """Entries that this controller owns, by model. Every change is answered with the scheduler's view of the model."""

    def __init__(self, ledger: Ledger, outbox: Outbox) -> None:
        self._ledger, self._outbox = ledger, outbox
        self._waiting: dict[ModelName, OrderedDict[str, tuple[Entry, Submission]]] = {}
        self._model_of: dict[str, ModelName] = {}

    def add(self, entry: Entry, submission: Submission) -> WaitingRequests:
        model = ModelName(submission.model)
        self._waiting.setdefault(model, OrderedDict())[submission.id] = (entry, submission)
        self._model_of[submission.id] = model
        return self.state(model)

    def holds(self, request_id: str) -> bool:
        return request_id in self._model_of

    def count(self, model: ModelName) -> int:
        return len(self._waiting.get(model, ()))

    def submissions(self) -> Iterator[Submission]:
        for group in self._waiting.values():
            for _, submission in group.values():
                yield submission

    def state(self, model: ModelName) -> WaitingRequests:
        """What the scheduler is told of ``model``."""
        group = [submission for _, submission in self._waiting.get(model, {}).values()]
        if not group:
            return WaitingRequests(model, 0, float("inf"))
        return WaitingRequests(
            model,
            len(group),
            min(s.arrival_s for s in group),
            sum(s.prompt_tokens for s in group),
            min(s.arrival_s + s.slo_ttft_s for s in group),
        )

    def route(self, model: ModelName, devices: Sequence[DeviceId], most: int | None = None) -> WaitingRequests:
        """Moves the model's requests, or the first ``most`` of them, to the devices' queues, each to the least loaded
        one."""
        queues = [keys.device_queue(device) for device in devices]
        for entry, submission in self._take(model, most):
            moved = msgspec.structs.replace(submission, hops=submission.hops + 1)
            self._ledger.move(entry, queues, encode(moved))
        return self.state(model)

    def refuse(
        self, model: ModelName, refusal: Refusal, *, arrived_before_s: float | None = None, keep: int = 0
    ) -> WaitingRequests:
        """Ends the model's requests with an error: all of them, or those that arrived before ``arrived_before_s``, or
        all but the oldest ``keep``."""
        group = sorted(self._waiting.get(model, {}).values(), key=lambda item: item[1].arrival_s)
        chosen = [x for x in group[keep:] if arrived_before_s is None or x[1].arrival_s < arrived_before_s]
        for entry, submission in chosen:
            self._forget(model, submission.id)
            failed = Failed(
                id=submission.id,
                status=refusal.status,
                type=error_type(refusal.status),
                code=refusal.code,
                message=refusal.message,
                retry_after_s=refusal.retry_after_s,
            )
            self._outbox.send(submission.front, failed)
            self._ledger.done(entry)
        return self.state(model)

    def cancel(self, request_id: str) -> WaitingRequests | None:
        """Drops one request whose client is gone; None when it is not here."""
        model = self._model_of.get(request_id)
        if model is None:
            return None
        self._ledger.done(self._forget(model, request_id))
        return self.state(model)

    def _forget(self, model: ModelName, request_id: str) -> Entry:
        del self._model_of[request_id]
        entry = self._waiting[model].pop(request_id)[0]
        if not self._waiting[model]:
            del self._waiting[model]
        return entry

    def _take(self, model: ModelName, most: int | None) -> list[tuple[Entry, Submission]]:
        taken = list(self._waiting.get(model, {}).values())[:most]
        for _, submission in taken:
            self._forget(model, submission.id)
        return taken
