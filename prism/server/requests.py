"""From bytes to a checked request. Whatever a client can get wrong ends here as a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from prism.server.errors import ApiError, context_length_exceeded, invalid
from prism.server.shapes import check_bias, check_format, check_messages, check_prompt, check_stops, shown

R = TypeVar("R", bound=BaseModel)

IGNORED: Final = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "safety_identifier", "service_tier", "store", "verbosity"}
)
"""OpenAI's fields that change nothing here; clients send them by default."""

UNSUPPORTED: Final = frozenset(
    {
        "audio", "functions", "function_call", "modalities", "web_search_options", "suffix", "best_of",
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "custom_logit_processor",
        "custom_params", "stop_regex",
        "data_parallel_rank", "disagg_prefill_dp_rank", "images_config", "lora_path", "max_dynamic_patch",
        "min_dynamic_patch", "priority", "return_hidden_states", "return_routed_experts", "rid", "routed_dp_rank",
        "routed_experts_start_len", "session_id", "session_params", "task", "use_audio_in_video",
    }
)  # fmt: skip
"""Fields that are refused when they are set: OpenAI's that this server cannot honour, and SGLang's internals."""

GRAMMARS: Final = ("regex", "ebnf", "json_schema", "response_format", "tools")
"""Fields that say what the answer looks like: a tool that must be called does, too."""

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_GRAMMAR_CHARS: Final = 65_536
MAX_TEMPERATURE: Final = 100.0
_INT32: Final = 2**31 - 1


def read_json(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises :class:`ApiError`."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return data


def parse(kind: type[R], data: dict[str, Any]) -> R:
    """``data`` as ``kind`` (one of SGLang's request models). Raises :class:`ApiError` naming the first wrong field."""
    check_fields(kind, data)
    check_values(data)
    no_answer = data.get("max_tokens") == 0  # which SGLang's models do not take
    try:
        request = kind.model_validate({**data, "max_tokens": 1} if no_answer else data)
        if no_answer:
            request.max_tokens = 0  # type: ignore[attr-defined]
        return request
    except ValidationError as error:
        raise _first_problem(error, data) from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise invalid(f"The request is malformed: {error}.") from None


def check_fields(kind: type[BaseModel], data: dict[str, Any]) -> None:
    """Drops what is ignored, refuses what is unknown or unsupported. Changes ``data``."""
    known = kind.model_fields
    for name in list(data):
        if name in IGNORED:
            del data[name]
        elif name in UNSUPPORTED:
            if data[name] not in (None, False, ["text"], 0):
                raise invalid(f"{name!r} is not supported by this server.", name, "unsupported_parameter")
            del data[name]
        elif name not in known and name != "reasoning":
            raise invalid(f"Unknown field {name!r}.", name[:100], "unknown_parameter")


def check_values(data: Mapping[str, Any]) -> None:
    """Bounds that the request models do not know, and shapes that their validators stumble over."""
    for name in ("stream", "echo"):
        if not isinstance(data.get(name), bool | None):
            raise invalid(f"{name!r} must be true or false (got {shown(data[name])}).", name, "invalid_type")
    _whole(data, "n", 1, MAX_CHOICES)
    hint = "0 is for 'echo', which repeats the prompt" if "prompt" in data else ""
    _whole(data, "max_tokens", 0 if data.get("echo") is True else 1, _INT32, hint)
    _whole(data, "max_completion_tokens", 1, _INT32)
    _whole(data, "min_tokens", 0, _INT32)
    _whole(data, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    _whole(data, "top_k", -1, _INT32)
    _whole(data, "seed", -(2**63), 2**63 - 1 - MAX_CHOICES)
    if not isinstance(data.get("logprobs"), bool):
        _whole(data, "logprobs", 0, MAX_TOP_LOGPROBS)
    if data.get("max_tokens") == 0 and data.get("min_tokens"):
        raise invalid(f"'min_tokens' must be 0 where 'max_tokens' is (got {shown(data['min_tokens'])}).", "min_tokens")
    if data.get("top_logprobs") is not None and not data.get("logprobs"):
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    for name in ("response_format", "stream_options", "chat_template_kwargs", "custom_params", "reasoning"):
        if not isinstance(data.get(name), dict | None):
            raise invalid(f"{name!r} must be an object.", name, "invalid_type")
    if data.get("stream_options") is not None and not data.get("stream"):
        raise invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    for name in ("regex", "ebnf", "json_schema"):
        if isinstance(data.get(name), str) and len(data[name]) > MAX_GRAMMAR_CHARS:
            raise invalid(f"{name!r} may have {MAX_GRAMMAR_CHARS} characters.", name)
    if isinstance(data.get("temperature"), int | float) and data["temperature"] > MAX_TEMPERATURE:
        raise invalid(f"'temperature' may be {MAX_TEMPERATURE:g} at most.", "temperature")
    check_format(data.get("response_format"))
    check_messages(data.get("messages"))
    check_stops(data.get("stop"))
    check_bias(data.get("logit_bias"))
    if "prompt" in data:
        check_prompt(data["prompt"])


def _whole(data: Mapping[str, Any], name: str, low: int, high: int, of_zero: str = "") -> None:
    """``of_zero``: what to say of a 0 that is too low."""
    value = data.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise invalid(f"{name!r} must be a whole number (got {shown(value)}).", name, "invalid_type")
    if not low <= value <= high:
        hint = f"; {of_zero}" if of_zero and value == 0 else ""
        raise invalid(f"{name!r} must be between {low} and {high} (got {shown(value)}{hint}).", name)


def grammar_field(request: Any) -> str | None:
    """The field of a parsed request that says what its answer looks like."""
    return next((name for name in GRAMMARS if getattr(request, name, None)), None)


def check_prompt_ids(prompt: Any, context_tokens: int | None, param: str) -> None:
    """Raises :class:`ApiError` for more token ids than the model takes, before anything looks at them one by one:
    millions would keep everybody else waiting."""
    if context_tokens is None or not isinstance(prompt, list) or not prompt:
        return
    for row in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(row, list) and row and not isinstance(row[0], str) and len(row) > context_tokens:
            raise context_length_exceeded(context_tokens, len(row), None, param)


def check_token_ids(request: Any, vocab_size: int) -> None:
    """Token ids of ``logit_bias`` and ``stop_token_ids`` must exist in the model (an engine would index with them)."""
    for token in getattr(request, "logit_bias", None) or ():
        if int(token) >= vocab_size:
            raise invalid(f"'logit_bias' has token {token}, the model has {vocab_size}.", "logit_bias")
    for token in getattr(request, "stop_token_ids", None) or ():
        if not 0 <= token < vocab_size:
            raise invalid(f"'stop_token_ids' has token {token}, the model has {vocab_size}.", "stop_token_ids")


def _first_problem(error: ValidationError, data: Mapping[str, Any]) -> ApiError:
    problems = error.errors(include_url=False, include_context=False)
    # A union complains once per branch; branches of another role or type say nothing about the one that was meant.
    meant = [p for p in problems if p["loc"] and p["loc"][-1] not in ("role", "type")]
    problem = (meant or problems)[0]
    path = [str(part) for part in problem["loc"]]
    field = path[0] if path else None
    # The parts of a path below a union are names of its branches: only those that lead into the client's data are
    # shown.
    led: list[str] = []
    value: Any = data
    for part in path:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif (led and part != path[-1]) or (led and not _is_field(part)):
            continue
        led.append(part)
    param = ".".join(led) or field
    code = "missing_parameter" if problem["type"] == "missing" else "invalid_value"
    said = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return invalid(f"{param}: {said}." if param else f"{said}.", param, code)


def _is_field(part: str) -> bool:
    return part.replace("_", "").isalpha() and part.islower() and part not in {"str", "int", "float", "bool", "list"}


_THEIR_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_MEANT: Final = {"tool": "tools", "schema_": "response_format", "json_schema": "response_format"}
"""What SGLang's messages call a field that has no such name in a request."""
_WORD: Final = re.compile(r"[A-Za-z_]+")


def refused_by_sglang(message: str, fields: Container[str]) -> ApiError:
    """400 for what SGLang found wrong: the field is the first that its message names, by the client's name for it."""
    for theirs, ours in _THEIR_NAMES.items():
        message = message.replace(theirs, ours)
    words = (word.lower() for word in _WORD.findall(message))
    named = (_MEANT.get(word, word) for word in words)
    return invalid(message, next((word for word in named if word in fields), None))
