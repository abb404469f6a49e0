"""From bytes to a checked request. Whatever a client can get wrong ends here as a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from prism.server.errors import ApiError, context_length_exceeded, invalid

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

ROLES: Final = ("user", "system", "developer", "assistant", "tool", "function", "latest_reminder")
"""The last one is SGLang's alone."""

FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
"""Of ``response_format``."""
GRAMMARS: Final = ("regex", "ebnf", "json_schema", "response_format", "tools")
"""Fields that say what the answer looks like: a tool that must be called does, too."""

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 256
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_NAME_BYTES: Final = 64
MAX_SHOWN: Final = 10
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
        raise invalid(f"'min_tokens' must be 0 where 'max_tokens' is (got {_shown(data['min_tokens'])}).", "min_tokens")
    if data.get("top_logprobs") is not None and not data.get("logprobs"):
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    for name in ("response_format", "stream_options", "chat_template_kwargs", "custom_params", "reasoning"):
        if not isinstance(data.get(name), dict | None):
            raise invalid(f"{name!r} must be an object.", name, "invalid_type")
    if not isinstance(data.get("stream"), bool | None):
        raise invalid(f"'stream' must be true or false (got {_shown(data['stream'])}).", "stream", "invalid_type")
    if data.get("stream_options") is not None and not data.get("stream"):
        raise invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    for name in ("regex", "ebnf", "json_schema"):
        if isinstance(data.get(name), str) and len(data[name]) > MAX_GRAMMAR_CHARS:
            raise invalid(f"{name!r} may have {MAX_GRAMMAR_CHARS} characters.", name)
    if isinstance(data.get("temperature"), int | float) and data["temperature"] > MAX_TEMPERATURE:
        raise invalid(f"'temperature' may be {MAX_TEMPERATURE:g} at most.", "temperature")
    _format(data.get("response_format"))
    _roles(data.get("messages"))
    _stops(data.get("stop"))
    _bias(data.get("logit_bias"))
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > MAX_PROMPTS:
        raise invalid(f"At most {MAX_PROMPTS} prompts in one request.", "prompt")
    for row in [prompt, *prompt] if isinstance(prompt, list) else ():
        if isinstance(row, list) and bool in map(type, row):  # which SGLang's models take for 0 and 1
            raise invalid("Token ids in 'prompt' must be whole numbers (got true or false).", "prompt", "invalid_type")


def _whole(data: Mapping[str, Any], name: str, low: int, high: int, of_zero: str = "") -> None:
    """``of_zero``: what to say of a 0 that is too low."""
    value = data.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise invalid(f"{name!r} must be a whole number (got {_shown(value)}).", name, "invalid_type")
    if not low <= value <= high:
        hint = f"; {of_zero}" if of_zero and value == 0 else ""
        raise invalid(f"{name!r} must be between {low} and {high} (got {_shown(value)}{hint}).", name)


def grammar_field(request: Any) -> str | None:
    """The field of a parsed request that says what its answer looks like."""
    return next((name for name in GRAMMARS if getattr(request, name, None)), None)


def _format(wanted: Mapping[str, Any] | None) -> None:
    """SGLang's union of formats complains about fields of another one."""
    if wanted is None:
        return
    if (kind := wanted.get("type")) not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise invalid(f"'response_format.type' must be one of {known} (got {_shown(kind)}).", "response_format.type")
    if kind == "json_schema" and not isinstance(wanted.get("json_schema"), dict):
        raise invalid("'response_format.json_schema' must be an object with a 'schema'.", "response_format")


def _roles(messages: Any) -> None:
    """SGLang's own words leave out the commonest role."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role.lower() not in ROLES:
            known = ", ".join(map(repr, ROLES[:-1]))
            raise invalid(f"'role' must be one of {known} (got {_shown(role)}).", f"messages.{i}.role")


def _stops(stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise invalid("'stop' must be a string or a list of strings.", "stop", "invalid_type")
    if len(stops) > MAX_STOPS or not all(stops):
        raise invalid(f"'stop' takes up to {MAX_STOPS} strings that are not empty.", "stop")


def _bias(bias: Any) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise invalid("'logit_bias' must be an object.", "logit_bias", "invalid_type")
    if strange := [token for token in bias if not (token.isascii() and token.isdigit())]:
        shown = ", ".join(map(_shown, strange[:MAX_SHOWN]))
        raise invalid(f"'logit_bias' needs token ids as keys (got {shown}).", "logit_bias")
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise invalid(f"'logit_bias' values go from -100 to 100 (got {_shown(value)}).", "logit_bias")


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
    shown: list[str] = []
    value: Any = data
    for part in path:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif (shown and part != path[-1]) or (shown and not _is_field(part)):
            continue
        shown.append(part)
    param = ".".join(shown) or field
    code = "missing_parameter" if problem["type"] == "missing" else "invalid_value"
    said = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return invalid(f"{param}: {said}." if param else f"{said}.", param, code)


def _is_field(part: str) -> bool:
    return part.replace("_", "").isalpha() and part.islower() and part not in {"str", "int", "float", "bool", "list"}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_NAME_BYTES else text[:MAX_NAME_BYTES] + "..."


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
