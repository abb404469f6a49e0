"""Errors a client can meet, and how they look on the wire: OpenAI's error object and headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prism.core.errors import PrismError
from prism.store.values import QueueFull, StoreError, StoreUnavailable
from prism.wire.messages import Failed

MAX_SHOWN_CHARS: Final = 100
"""Of what a client sent, in a message."""


class ApiError(PrismError):
    """Ends a request. ``type``, ``code`` and ``param`` are OpenAI's; ``retry_after_s`` says when a repetition may
    succeed (None: repeating it unchanged is pointless, and the client is told so)."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status, self.code, self.type, self.param, self.retry_after_s = status, code, type, param, retry_after_s
        self.message = message
        self.limits: Mapping[str, str] = {}
        """``x-ratelimit-*`` headers, when a limit was the reason."""
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> Mapping[str, str]:
        """``Retry-After`` (whole seconds, at least 1) and ``x-should-retry``, which OpenAI's clients obey."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false", **self.limits}
        return {"x-should-retry": "true", "retry-after": str(max(1, math.ceil(self.retry_after_s))), **self.limits}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: a field of the request is wrong."""
    return ApiError(400, code, message, param=param)


def context_length_exceeded(limit: int, prompt: int, wanted: int | None, param: str) -> ApiError:
    """400: prompt and answer do not fit the model's context."""
    asked = f"{prompt} in the prompt" + ("" if wanted is None else f", {wanted} for the answer")
    message = (
        f"This model's maximum context length is {limit} tokens, but the request needs {prompt + (wanted or 1)}"
        f" ({asked}). Shorten the prompt or lower the number of tokens to generate."
    )
    return ApiError(400, "context_length_exceeded", message, param=param)


def input_too_long(limit: int, tokens: int, param: str) -> ApiError:
    """400: one input of a model that generates nothing does not fit its context."""
    message = f"An input has {tokens} tokens; this model takes {limit}. Shorten it or cut it into several."
    return ApiError(400, "context_length_exceeded", message, param=param)


def model_not_found(name: str, near: Sequence[str]) -> ApiError:
    """404 with the names that resemble the one asked for."""
    hint = f" Did you mean {', '.join(repr(n) for n in near)}?" if near else ""
    shown = name if len(name) <= MAX_SHOWN_CHARS else name[:MAX_SHOWN_CHARS] + "..."
    return ApiError(404, "model_not_found", f"The model {shown!r} does not exist.{hint}", param="model")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, type="authentication_error")


def forbidden(message: str, param: str | None = None) -> ApiError:
    return ApiError(403, "forbidden", message, type="permission_error", param=param)


def rate_limited(what: str, limit: int, retry_after_s: float) -> ApiError:
    """429: the key's own limit. ``what``: ``requests`` or ``tokens``."""
    message = f"Rate limit reached: {limit} {what} per minute. Try again in {max(0.1, retry_after_s):.1f} s."
    return ApiError(429, "rate_limit_exceeded", message, type=what, retry_after_s=retry_after_s)


def never_affordable(limit: int, prompt: int, needs: int, fits: int, chosen: bool) -> ApiError:
    """400: the key's tokens per minute are fewer than the request may use, however long the client waits. ``fits``: the
    longest answer that would do."""
    asked = f"This request may use {needs} tokens ({prompt} in the prompt), and its key is allowed {limit} per minute."
    if fits < 1:
        return ApiError(400, "tokens_over_limit", f"{asked} Shorten the prompt.")
    how = (
        "Lower 'max_tokens' to" if chosen else "Without 'max_tokens' the answer may fill the model's context: set it to"
    )
    return ApiError(400, "tokens_over_limit", f"{asked} {how} {fits} or less.", param="max_tokens")


def queue_full(waiting: int, limit: int, retry_after_s: float) -> ApiError:
    """429: the server's bound on waiting requests."""
    message = f"{waiting} requests are waiting already (bound: {limit}). Try again in {retry_after_s:.0f} s."
    return ApiError(429, "queue_full", message, type="overloaded_error", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: float | None = 2.0, code: str = "unavailable") -> ApiError:
    """503: this server cannot do it now."""
    return ApiError(503, code, message, type="server_error", retry_after_s=retry_after_s)


def cancelled(reason: str) -> ApiError:
    """409: the request was stopped on somebody's order."""
    return ApiError(409, "cancelled", f"The request was cancelled {reason}.", type="server_error")


def internal(message: str = "The server had an internal error while processing the request.") -> ApiError:
    return ApiError(500, "internal_error", message, type="server_error", retry_after_s=1.0)


def from_failed(failed: Failed) -> ApiError:
    """What an agent or the controller said of a request."""
    return ApiError(
        failed.status,
        failed.code,
        failed.message,
        type=failed.type,
        param=failed.param,
        retry_after_s=failed.retry_after_s,
    )


_GRAMMAR: Final = re.compile(
    r"Failed to compile \w+ grammar: (?:\[[\d:]+\] )?(?:\S+\.cc:\d+: )?(?:Check failed: .*? is false: )?(?P<why>.*)",
    re.S,
)
"""How SGLang passes on what xgrammar found, with the place in xgrammar's sources that found it."""


def from_abort(finish: Mapping[str, object], grammar: str | None = None) -> ApiError:
    """What the engine said when it gave a request up (SGLang's finish reason of type ``abort``). ``grammar``: the field
    that says what the answer looks like."""
    status = finish.get("status_code")
    message = str(finish.get("message") or "The engine stopped the request.")
    if isinstance(status, int) and 400 <= status < 500:
        if (found := _GRAMMAR.match(message)) is not None:
            why = found["why"].strip().rstrip(".")
            return invalid(f"{grammar or 'structured output'!r} cannot be turned into a grammar: {why}.", grammar)
        return ApiError(int(status), "invalid_value", message)
    if status == 503:
        return unavailable(message)
    if status is None:
        return cancelled("by the engine")
    return internal(message)


def from_store(error: StoreError) -> ApiError:
    """A store that refuses or is away."""
    if isinstance(error, QueueFull):
        return queue_full(error.length, error.limit, 1.0)
    if isinstance(error, StoreUnavailable):
        return unavailable("The server's request store does not answer at the moment.")
    return internal(str(error))
