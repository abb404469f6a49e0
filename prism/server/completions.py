"""The endpoints that ask something of a model: from the socket to the queue and back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prism.core.ids import ModelName
from prism.obs import names
from prism.server.auth import Caller
from prism.server.errors import ApiError, internal, invalid, never_affordable, unavailable
from prism.server.front import Front
from prism.server.http import read_body
from prism.server.images import take_images
from prism.server.kinds import served_at, wrong_kind
from prism.server.models import ServedModel
from prism.server.recorder import Record
from prism.server.requests import (
    check_prompt_ids,
    check_token_ids,
    grammar_field,
    parse,
    read_json,
    refused_by_sglang,
)
from prism.server.sse import ClientGone, EventStream, Timing

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_CHOICES: Final = 3
"""Other models that a message names."""
LONG_BODY_BYTES: Final = 32_000
"""Bodies above are converted (template, tokens) on a thread."""

BAD_INPUT: Final = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What templates and converters raise on input nobody thought of: the client's fault, not a failure of the server."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    route: str
    request: type[BaseModel]
    prefix: str
    """Of the response's id."""
    param: str
    """The field that holds the prompt."""
    takes_ids: bool = True
    """The prompt may be token ids."""
    streams: bool = True


class Completions:
    """The ASGI endpoint of one kind."""

    def __init__(self, front: Front, kind: Endpoint) -> None:
        self._front, self._kind = front, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        record = Record(scope["state"]["request_id"], self._kind.route, time.time())
        record.client_id = headers.get("x-client-request-id", "")[:128]
        record.words = self._front.catalog.log.prompts
        try:
            await self._serve(headers, record, scope, receive, send)
        except ClientGone:
            record.cancelled = True
        except ApiError as error:
            record.error = error
            raise
        except asyncio.CancelledError:
            record.cancelled = True
            raise
        except Exception as error:
            log.exception("a request failed", extra={"request_id": record.request_id})
            record.error = internal()
            raise record.error from error
        finally:
            self._front.recorder.ended(record)

    async def _serve(self, headers: Headers, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        front.check_open()
        caller = front.gate.caller(headers)
        record.key = caller.name
        body = await read_body(receive, headers, int(front.catalog.server.max_body_bytes))
        request, served = await self._request(body, caller, record)
        serving = served.endpoints[self._kind.route]
        from prism.server.sglang_manager import new_call

        call = new_call(record.request_id, self._kind.prefix, served.objectives, self._kind.param)
        call.adapter, call.grammar = served.adapter, grammar_field(request)
        record.streams = call.streams
        call.max_prepared_bytes = int(front.catalog.server.images.max_prepared_bytes)
        call.piecewise = bool(getattr(request, "tools", None) or served.config.reasoning_parser)
        adapted = await _convert(serving, request, body, self._kind.param)
        tokens = await _affordable(front, caller, adapted, serving)
        try:
            await front.gate.admit(caller, tokens)
        except ApiError as error:
            error.limits = caller.headers
            raise
        adapted.prism_call = call
        call.echo_chars = getattr(adapted, "prism_echo_chars", ())
        call.prompt_only = getattr(adapted, "prism_prompt_only", False)
        try:
            await _submit(receive, serving, adapted, call, self._kind)
            await self._respond(serving, adapted, request, record, headers, caller, scope, receive, send)
        finally:
            served.manager.abandon(call)
            front.gate.settle(caller, tokens - _used(record))

    async def _request(self, body: bytes, caller: Caller, record: Record) -> tuple[Any, ServedModel]:
        front, data = self._front, read_json(body)
        if not isinstance(data.get("model"), str):
            code = "missing_parameter" if data.get("model") is None else "invalid_type"
            raise invalid("'model' must be the name of a model.", "model", code)
        model = await front.find(data["model"])
        front.gate.check_model(caller, model)
        record.model = model
        if front.catalog.log.prompts:
            record.prompt = data.get(self._kind.param)
        if self._kind.takes_ids:
            check_prompt_ids(data.get(self._kind.param), front.models.context_tokens(model), self._kind.param)
        request = parse(self._kind.request, data)
        front.check_backlog(model)
        served = await front.models.get(model)
        if self._kind.route not in served.endpoints:
            raise wrong_kind(model, served.kind, self._kind.route, await self._others(caller))
        await take_images(request, front.catalog.server.images, front.images, served.manager.takes_images)
        from prism.server.sglang_tools import check_tools

        if (warning := check_tools(request, served.config.tool_call_parser, model)) is not None:
            caller.headers["x-prism-warning"] = warning
        record.objectives = served.objectives
        check_token_ids(request, served.manager.vocab_size)
        return request, served

    async def _others(self, caller: Caller) -> list[str]:
        """Some models that the caller may use here, as far as their files can be read."""
        front = self._front
        usable = [m for m in front.catalog.models if front.catalog.may_use(caller.key, m.name)]
        await front.models.learn(usable)
        kinds = {m.name: front.models.kind(ModelName(m.name)) for m in usable}
        return [name for name, kind in kinds.items() if kind and self._kind.route in served_at(kind)][:MOST_CHOICES]

    async def _respond(
        self,
        serving: Any,
        adapted: Any,
        request: Any,
        record: Record,
        headers: Headers,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if not getattr(request, "stream", False):
            answer = await self._timed(unless_gone(receive, serving.answer(adapted, request)))
            content = answer if isinstance(answer, bytes) else answer.model_dump_json()
            response = Response(content, media_type="application/json", headers=caller.headers)
            await response(scope, receive, send)
            return
        record.streaming = True
        follow = headers.get("x-prism-progress", "").lower() in ("1", "true", "yes")
        timing = self._front.timing
        if follow:
            for stream in record.streams:
                await self._front.broker.follow(stream)
            timing = Timing(0.0, min(1.0, timing.keepalive_s), timing.write_s)
        events = EventStream(
            serving.events(adapted, request),
            timing,
            lambda: _comment(self._front, record, follow),
            caller.headers,
            _as_error,
        )
        await events.start(receive)
        await self._timed(events(scope, receive, send))
        record.error = events.error

    async def _timed(self, work: Awaitable[T]) -> T:
        limit_s = self._front.catalog.server.request_timeout_s
        if limit_s is None:
            return await work
        try:
            async with asyncio.timeout(float(limit_s)):
                return await work
        except TimeoutError:
            raise unavailable(f"The request did not finish within {limit_s:g} s.", None, "request_timeout") from None


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """``work``, cancelled when the client leaves; then raises :class:`ClientGone`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _submit(receive: Receive, serving: Any, adapted: Any, call: Any, kind: Endpoint) -> None:
    try:
        await unless_gone(receive, serving.submit(adapted, call))
    except BAD_INPUT as error:
        raise refused_by_sglang(str(error), kind.request.model_fields) from error


async def _convert(serving: Any, request: Any, body: bytes, param: str) -> Any:
    try:
        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(serving.convert, request)
        return serving.convert(request)
    except ApiError:
        raise
    except BAD_INPUT as error:
        log.info("a request could not be converted", exc_info=True)
        raise invalid(f"The request cannot be processed: {str(error).rstrip('.')}.", param) from error
    except Exception as error:
        if type(error).__module__.startswith("jinja2"):
            raise invalid(f"The model's chat template refuses the messages: {error}.", "messages") from error
        raise


async def _affordable(front: Front, caller: Caller, adapted: Any, serving: Any) -> int:
    """What the request takes from its key's limit. Raises :class:`ApiError` (400) when the limit can never be met; a
    prompt is tokenised for that if its length is only estimated."""
    limit = front.gate.limit_tokens(caller)
    demand = serving.demand(adapted, exact=False)
    if limit is not None and demand.tokens > limit:
        demand = await asyncio.to_thread(serving.demand, adapted, exact=True)
        if demand.tokens > limit:
            raise never_affordable(limit, demand.prompt_tokens, demand.tokens, demand.fitting(limit), demand.chosen)
    return int(demand.tokens)


def _used(record: Record) -> int:
    return sum(stream.prompt_tokens + len(stream.log.tokens) for stream in record.streams)


def _comment(front: Front, record: Record, follow: bool) -> str:
    """A comment line for a silent stream: where the request stands."""
    stream = next((s for s in record.streams if s.first_token_s is None), None)
    if stream is None:
        return ": keep-alive\n\n"
    progress = stream.progress
    state = progress.state if progress is not None else front.placements.state(stream.model)
    if not follow:
        return f": {state}\n\n"
    fields: dict[str, object] = {
        "state": state,
        "model": record.model,
        "placement": front.placements.state(stream.model),
    }
    if progress is not None:
        fields |= {"position": progress.position, "note": progress.note}
    fields["waited_s"] = round(time.time() - record.arrival_s, 3)
    return f": prism {json.dumps({k: v for k, v in fields.items() if v not in (None, '')})}\n\n"


def _as_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return internal()


def refusal_reason(error: ApiError) -> str | None:
    """Label of :data:`prism.obs.names.REFUSED`; None when the error is no refusal at the door."""
    by_code = {"queue_full": "queue_full", "rate_limit_exceeded": "rate_limit", "shutting_down": "draining"}
    by_status = {401: "unauthorized", 403: "forbidden", 413: "too_large"}
    return by_code.get(error.code) or by_status.get(error.status)


__all__ = ["Completions", "Endpoint", "names", "refusal_reason", "unless_gone"]
