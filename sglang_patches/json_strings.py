"""Strings of a JSON schema as xgrammar has to be told of them, so that what it lets through is JSON.

It takes the regular expression of ``pattern`` for the text between the quotes, and of ``minLength`` and ``maxLength``
makes one of its own; both let through what JSON forbids there: control characters (a tab, say), and, where a dot or a
class has them, quotes and backslashes. Schemas are rewritten before it sees them:

- bounds of a length become a pattern of as many characters that JSON needs no escape for;
- a dot and classes lose what JSON would escape, as long as anything else is left in them;
- what is named by itself and has to be escaped is: ``"``, ``\\\\``, ``\\n`` and their like.

What is said matches the schema as it was; values that need an escape where a class stands are not said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_SCHEMAS_BY_NAME: Final = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a schema under which any name may stand."""
_VALUES: Final = frozenset({"enum", "const", "default", "examples"})
"""Keys of a schema under which there is no schema."""
_UNSAFE: Final = frozenset({*range(0x20), ord('"'), ord("\\")})
_NOT_UNSAFE: Final = r'"\\\x00-\x1f'
"""In a class, what is not to be in it."""
_ANY: Final = f"[^{_NOT_UNSAFE}]"
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}
_ESCAPED: Final = {'"': r"\\\"", "\\": r"\\\\", "\n": r"\\n", "\r": r"\\r", "\t": r"\\t", "\f": r"\\f", "\b": r"\\b"}
"""Characters as JSON writes them, as a regular expression."""
_CODE: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|c([A-Za-z])")
_OPERATORS: Final = ".^$*+?()[]{}|"
_TOP: Final = 0x10FFFF
_LONG: Final = 4096
"""Longer patterns are left as they are."""


def as_json_text(schema: Any) -> Any:
    """``schema`` (or anything with schemas in it) for xgrammar. What is given stays as it is."""
    if isinstance(schema, list):
        return [as_json_text(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _VALUES:
            found[name] = value
        elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: as_json_text(one) for key, one in value.items()}
        else:
            found[name] = as_json_text(value)
    return _string(found)


def _string(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type")
    of_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    if not of_strings or schema.keys() & {"enum", "const", "format"}:
        return schema
    low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if isinstance(pattern, str):
        return {**schema, "pattern": in_json(pattern)}
    if not _is_count(low) or not (high is None or _is_count(high)) or (not low and high is None):
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("minLength", "maxLength")}
    return {**rest, "pattern": f"^{_ANY}{{{int(low)},{'' if high is None else int(high)}}}$"}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def in_json(pattern: str) -> str:
    """A regular expression of values as one of the text that JSON has for them. What is not understood (groups with a
    question mark, references, Unicode properties) is given back as it was."""
    if len(pattern) > _LONG:
        return pattern
    try:
        return "".join(_parts(pattern))
    except (IndexError, ValueError):
        return pattern


def _parts(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            at, made = _class(pattern, at + 1)
            yield made
            continue
        if char == "(" and pattern[at + 1 : at + 2] == "?" and pattern[at + 2 : at + 3] != ":":
            raise ValueError("a group that is not plain")
        if char == "\\":
            at, made = _escape(pattern, at + 1)
            yield made
            continue
        yield _ANY if char == "." else _ESCAPED.get(char, char)
        at += 1


def _escape(pattern: str, at: int) -> tuple[int, str]:
    """What stands behind a backslash outside of a class."""
    char = pattern[at]
    if char in "dw":
        return at + 1, f"\\{char}"
    if char == "s":
        return at + 1, " "
    if char in "DWS":
        return at + 1, f"[^\\{char.lower()}{_NOT_UNSAFE}]"
    if char == "b":
        raise ValueError("the border of a word, not a character")
    at, code = _code(pattern, at)
    return at, _literal(code)


def _code(pattern: str, at: int) -> tuple[int, int]:
    """The character that an escape names."""
    char = pattern[at]
    if char in _CONTROLS:
        return at + 1, ord(_CONTROLS[char])
    if found := _CODE.match(pattern, at):
        byte, short, long, control = found.groups()
        return found.end(), ord(control) % 32 if control else int(byte or short or long, 16)
    if char.isalnum():
        raise ValueError(f"\\{char}")
    return at + 1, ord(char)


def _literal(code: int) -> str:
    if (char := chr(code)) in _ESCAPED:
        return _ESCAPED[char]
    if code < 0x20:
        return rf"\\u00{code:02x}"
    return f"\\{char}" if char in _OPERATORS else char


def _class(pattern: str, at: int) -> tuple[int, str]:
    """What stands behind ``[``, and where it ends."""
    negated = pattern[at] == "^"
    at += negated
    shorthands, ranges = list[str](), list[tuple[int, int]]()
    first = at
    while pattern[at] != "]" or at == first:
        if pattern[at] == "\\" and pattern[at + 1] in "dwsDWS":
            shorthands.append(pattern[at + 1])
            at += 2
            continue
        at, low = _code(pattern, at + 1) if pattern[at] == "\\" else (at + 1, ord(pattern[at]))
        high = low
        if pattern[at] == "-" and pattern[at + 1] != "]":
            at, high = _code(pattern, at + 2) if pattern[at + 1] == "\\" else (at + 2, ord(pattern[at + 1]))
        if high < low:
            raise ValueError("a range that ends before it begins")
        ranges.append((low, high))
    return at + 1, _negated(shorthands, ranges) if negated else _positive(shorthands, ranges)


def _negated(shorthands: list[str], ranges: list[tuple[int, int]]) -> str:
    if set(shorthands) & set("DWS"):
        raise ValueError("a class without what a shorthand is without")
    kept = "".join(f"\\{one}" for one in shorthands) + "".join(_range(*one) for one in ranges if one[1] >= 0x20)
    return f"[^{kept}{_NOT_UNSAFE}]"


def _positive(shorthands: list[str], ranges: list[tuple[int, int]]) -> str:
    if set(shorthands) & set("DWS"):
        raise ValueError("a class with what a shorthand is without")
    safe = [part for one in ranges for part in _safe(*one)]
    kept = "".join(f"\\{one}" for one in shorthands if one != "s") + " " * ("s" in shorthands)
    kept += "".join(_range(*one) for one in safe)
    if kept:
        return f"[{kept}]"
    return "(" + "|".join(_literal(code) for low, high in ranges for code in range(low, min(high, 0x7F) + 1)) + ")"


def _safe(low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of a range that JSON needs no escape for."""
    for code in sorted(_UNSAFE):
        if low <= code <= high:
            if low < code:
                yield low, code - 1
            low = code + 1
    if low <= high:
        yield low, min(high, _TOP)


def _range(low: int, high: int) -> str:
    def shown(code: int) -> str:
        if code < 0x20:
            return f"\\x{code:02x}"
        return f"\\{chr(code)}" if chr(code) in r"\]^-[" else chr(code)

    return shown(low) if low == high else f"{shown(low)}-{shown(high)}"
