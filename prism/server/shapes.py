"""Shapes of the fields that SGLang's models describe as unions: those complain about a branch that nobody meant, so
these say first what is wrong and where. All raise
:class:`~prism.server.errors.ApiError` (400)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prism.server.errors import invalid

ROLES: Final = ("user", "system", "developer", "assistant", "tool", "function", "latest_reminder")
"""The last one is SGLang's alone."""

FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
"""Of ``response_format``."""

PARTS: Final[Mapping[str, tuple[str, str | None]]] = {
    "text": ("text", None),
    "image_url": ("image_url", "url"),
    "video_url": ("video_url", "url"),
    "audio_url": ("audio_url", "url"),
}
"""By a content part's type: the field that it needs and, where that is an object, the string which that needs."""

MAX_PROMPTS: Final = 256
MAX_STOPS: Final = 16
MAX_NAME_BYTES: Final = 64
MAX_SHOWN: Final = 10

_PROMPT: Final = "a string, a list of strings, a list of token ids, or a list of such lists"


def shown(value: object) -> str:
    """A client's value in a message, cut."""
    text = repr(value)
    return text if len(text) <= MAX_NAME_BYTES else text[:MAX_NAME_BYTES] + "..."


def check_prompt(prompt: Any) -> None:
    """Of a text completion."""
    if isinstance(prompt, str) or prompt == []:
        return
    if not isinstance(prompt, list):
        raise invalid(f"'prompt' must be {_PROMPT} (got {shown(prompt)}).", "prompt", "invalid_type")
    rows = [row for row in prompt if isinstance(row, list)]
    for ids in (prompt, *rows):
        if bool in map(type, ids):  # which SGLang's models take for 0 and 1
            raise invalid("Token ids in 'prompt' must be whole numbers (got true or false).", "prompt", "invalid_type")
    first = type(prompt[0])
    if first not in (str, int, list) or any(type(item) is not first for item in prompt):
        strange = next((item for item in prompt if type(item) not in (str, int, list)), None)
        got = "kinds mixed" if strange is None else shown(strange)
        raise invalid(f"'prompt' must be {_PROMPT} (got {got}).", "prompt", "invalid_type")
    if strange := [item for row in rows for item in row if type(item) is not int]:
        raise invalid(
            f"Token ids in 'prompt' must be whole numbers (got {shown(strange[0])}).", "prompt", "invalid_type"
        )
    if first is not int and len(prompt) > MAX_PROMPTS:
        raise invalid(f"At most {MAX_PROMPTS} prompts in one request.", "prompt")


def check_messages(messages: Any) -> None:
    """Roles and contents; what else is in a message is left to SGLang's models, whose words are clear."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            raise invalid(f"A message must be an object (got {shown(message)}).", f"messages.{i}", "invalid_type")
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and role.lower() not in ROLES:
            known = ", ".join(map(repr, ROLES[:-1]))
            raise invalid(f"'role' must be one of {known} (got {shown(role)}).", f"messages.{i}.role")
        if not isinstance(content, str | list | None) or (content is None and role == "user" and "content" in message):
            words = f"'content' must be a string or a list of parts (got {shown(content)})."
            raise invalid(words, f"messages.{i}.content", "invalid_type")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            _check_part(part, f"messages.{i}.content.{number}")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise invalid(f"A part of 'content' must be an object (got {shown(part)}).", where, "invalid_type")
    kind = part.get("type")
    if not isinstance(kind, str):
        words = f"A part of 'content' needs a 'type': {', '.join(map(repr, PARTS))} (got {shown(kind)})."
        raise invalid(words, f"{where}.type", "missing_parameter" if kind is None else "invalid_type")
    if kind not in PARTS:
        return
    name, inner = PARTS[kind]
    value, where = part.get(name), f"{where}.{name}"
    if inner is not None:
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{name!r} must be an object with a {inner!r} (got {shown(value)}).", where, "invalid_type")
        if value is not None:
            name, value, where = inner, value.get(inner), f"{where}.{inner}"
    if value is None:
        raise invalid(f"A part of type {kind!r} needs {name!r}.", where, "missing_parameter")
    if not isinstance(value, str):
        raise invalid(f"{name!r} must be a string (got {shown(value)}).", where, "invalid_type")


def check_format(wanted: Mapping[str, Any] | None) -> None:
    """``response_format``, which is an object."""
    if wanted is None:
        return
    if (kind := wanted.get("type")) not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise invalid(f"'response_format.type' must be one of {known} (got {shown(kind)}).", "response_format.type")
    if kind != "json_schema":
        return
    if not isinstance(described := wanted.get("json_schema"), dict):
        raise invalid("'response_format.json_schema' must be an object with a 'schema'.", "response_format")
    for name, type_, words in (("name", str, "a string"), ("schema", dict, "a JSON schema (an object)")):
        if not isinstance(value := described.get(name), type_):
            where = f"response_format.json_schema.{name}"
            code = "missing_parameter" if value is None else "invalid_type"
            raise invalid(f"'{where}' must be {words} (got {shown(value)}).", where, code)


def check_stops(stop: Any) -> None:
    """``stop``"""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise invalid("'stop' must be a string or a list of strings.", "stop", "invalid_type")
    if len(stops) > MAX_STOPS or not all(stops):
        raise invalid(f"'stop' takes up to {MAX_STOPS} strings that are not empty.", "stop")


def check_bias(bias: Any) -> None:
    """``logit_bias``"""
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise invalid("'logit_bias' must be an object.", "logit_bias", "invalid_type")
    if strange := [token for token in bias if not (token.isascii() and token.isdigit())]:
        some = ", ".join(map(shown, strange[:MAX_SHOWN]))
        raise invalid(f"'logit_bias' needs token ids as keys (got {some}).", "logit_bias")
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise invalid(f"'logit_bias' values go from -100 to 100 (got {shown(value)}).", "logit_bias")
