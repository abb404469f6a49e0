"""The bytes of a request, ready to be written to a socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from prism import __version__
from prism.core.errors import InvalidValue
from prism.trace.replay.http import Target
from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.replay.prompts import PromptMaker
from prism.trace.row import TraceRow

ENDPOINTS: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROMPT_MARK: Final = "@@PROMPT@@"
_OUTPUT_MARK: Final = 987654321


@dataclass(slots=True)
class Prepared:
    """A request that only waits for its time."""

    index: int
    due_s: float
    row: TraceRow
    data: bytes
    objective: Objective


class RequestFactory:
    """Turns rows into requests by filling in the length and the prompt of a body that is otherwise fixed per model."""

    def __init__(self, plan: SendPlan, api_key: str | None) -> None:
        self._plan = plan
        self._makers = {
            model: PromptMaker(source, plan.block_tokens, plan.seed) for model, source in plan.prompts.items()
        }
        self._bodies = {model: _template(plan, served) for model, served in plan.models.items()}
        self._head = _head(plan, Target.of(plan.url), api_key)

    def prepared(self, rows: Iterator[TraceRow], first_due_s: float, skip: frozenset[int]) -> Iterator[Prepared]:
        """The requests to send, those whose index is in ``skip`` left out; due times count from ``first_due_s`` of the
        trace. Raises :class:`InvalidValue` for a row without lengths or with a model that is not in the plan."""
        for index, row in enumerate(islice(rows, self._plan.limit)):
            if index not in skip:
                objective = self._plan.objectives.get(row.model, Objective())
                yield Prepared(index, row.arrival_s - first_due_s, row, self._bytes(row, index), objective)

    def _bytes(self, row: TraceRow, index: int) -> bytes:
        if row.prompt_tokens is None or row.output_tokens is None:
            raise InvalidValue("prompt_tokens", None, "has no lengths; fill them in first", where=f"row {index}")
        if row.model not in self._bodies:
            raise InvalidValue("model", row.model, "is not in the plan", list(self._bodies), where=f"row {index}")
        before, between, after = self._bodies[row.model]
        prompt = self._makers[row.model].prompt(row, index)
        body = b"".join((before, prompt, between, b"%d" % row.output_tokens, after))
        name = f"{self._plan.id_prefix}-{index}".encode()
        return b"".join((self._head, name, b"\r\nContent-Length: %d\r\n\r\n" % len(body), body))


def _template(plan: SendPlan, served: str) -> tuple[bytes, bytes, bytes]:
    """The body for one model, cut at the prompt and at the number of tokens."""
    if plan.endpoint not in ENDPOINTS:
        raise InvalidValue("endpoint", plan.endpoint, "unknown endpoint", list(ENDPOINTS))
    text: dict[str, object] = (
        {"prompt": _PROMPT_MARK}
        if plan.endpoint == "completions"
        else {"messages": [{"role": "user", "content": _PROMPT_MARK}]}
    )
    rest = {
        "model": served,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        **plan.extra,
    }
    if plan.ignore_eos:
        rest["ignore_eos"] = True
    body = msgspec.json.encode({**text, "max_tokens": _OUTPUT_MARK, **rest})
    before, _, tail = body.partition(_PROMPT_MARK.encode())
    between, _, after = tail.partition(b"%d" % _OUTPUT_MARK)
    return before, between, after


def _head(plan: SendPlan, target: Target, api_key: str | None) -> bytes:
    lines = [
        f"POST {target.base_path}{ENDPOINTS[plan.endpoint]} HTTP/1.1",
        f"Host: {target.host_header}",
        f"User-Agent: prism-replay/{__version__}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
        "X-Request-Id: ",
    ]
    return "\r\n".join(lines).encode()
