"""What clients are told of a refusal by a scheduler: status, error code and a sentence without a scheduler's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prism.core.ids import ModelName
from prism.core.reasons import Number, Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class ClientRefusal:
    """One refusal. The codes stand in ``docs/api.md``."""

    status: int
    code: str
    message: str


def refusal_of(model: ModelName, reason: Reason, detail: str = "") -> ClientRefusal:
    """``detail``: what the engine said, where it said something."""
    status, code = _CODES.get(reason.code, (503, reason.code.value))
    return ClientRefusal(status, code, _sentence(model, reason, dict(reason.numbers), detail))


def error_type(status: int) -> str:
    """OpenAI's ``type`` of an error with this status."""
    return "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"


_CODES: Mapping[ReasonCode, tuple[int, str]] = {
    ReasonCode.PROMPT_TOO_LARGE: (400, "context_length_exceeded"),
    ReasonCode.LATE_REJECTED: (429, "deadline_unreachable"),
    ReasonCode.QUEUE_FULL: (429, "queue_full"),
    ReasonCode.UNKNOWN_MODEL: (404, "model_not_found"),
}


def _sentence(model: ModelName, reason: Reason, numbers: Mapping[str, Number], detail: str) -> str:
    name = repr(str(model))
    match reason.code:
        case ReasonCode.PROMPT_TOO_LARGE:
            needs, room = numbers["tokens"], numbers["room_tokens"]
            larger = f" Larger ones are not served here: {detail}." if detail else ""
            return f"The request needs memory for {needs} tokens, and {name} can get it for {room} here.{larger}"
        case ReasonCode.LATE_REJECTED:
            return f"{name} is so busy that the first token would come too late, and it does not serve late requests."
        case ReasonCode.QUEUE_FULL:
            waiting = numbers.get("waiting", numbers.get("queued"))
            return f"{waiting} requests wait for {name} already."
        case ReasonCode.UNKNOWN_MODEL:
            return f"The model {name} was taken off this server."
        case ReasonCode.NO_FEASIBLE_DEVICE:
            return f"{name} does not fit on any device of this server, not even an empty one ({_needs(numbers)})."
        case ReasonCode.NOT_PLACED:
            return f"{name} has no place on this server: its scheduling policy uses a fixed map without it."
        case ReasonCode.NO_ROOM:
            return f"The memory that {name} needs is in use by other models, and it did not become free in time."
        case ReasonCode.NO_DEVICES:
            return f"No device of this server is up that could run {name}."
        case ReasonCode.ACTIVATION_FAILED:
            return f"{name} could not be loaded, or its engine died at every start: {detail or numbers.get('error')}"
        case _:
            return f"{name} cannot be served: {reason}"


def _needs(numbers: Mapping[str, Number]) -> str:
    """The sizes behind "does not fit", in GiB."""
    wanted = sum(_gib(numbers[key]) for key in ("weight_bytes", "min_kv_bytes", "need_bytes") if key in numbers)
    return f"it needs {wanted:.3g} GiB, the largest has {_gib(numbers['largest_device_bytes']):.3g} GiB"


def _gib(value: Number) -> float:
    return float(value) / (1 << 30)
