"""Validation errors of :mod:`jsonschema` in the catalog's own terms: which key, what it got, what may be there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from jsonschema.exceptions import ValidationError

from prism.config.sections.machine import DEVICE_PATTERN
from prism.config.sections.model import MODEL_NAME_PATTERN
from prism.config.yaml_source import KeyPath, YamlSource
from prism.core.errors import InvalidValue

_NAMES: Final = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "nothing",
}
_PATTERNS: Final = {
    DEVICE_PATTERN: "is not a device; write cuda:N or host:N",
    MODEL_NAME_PATTERN: "is not a model name (letters, digits and . _ : / @ + -, at most 200)",
}


def explain(error: ValidationError, source: YamlSource) -> Iterator[InvalidValue]:
    """The problems that ``error`` stands for."""
    path: KeyPath = tuple(error.absolute_path)
    schema: Any = error.schema
    rule: Any = error.validator_value
    value: Any = error.instance
    match error.validator:
        case "anyOf":
            yield from _alternatives(error, source)
        case "additionalProperties":
            known = tuple(schema["properties"])
            for key in sorted(set(value) - set(known)):
                yield source.problem((*path, key), key, "is not a known key", known)
        case "required":
            for key in (key for key in rule if key not in value):
                yield source.problem((*path, key), None, "is required but missing")
        case "enum":
            yield source.problem(path, value, "is not one of the choices", tuple(rule))
        case "type":
            yield source.problem(path, value, f"must be {_NAMES[rule]}")
        case "pattern":
            yield source.problem(path, value, _PATTERNS.get(rule, f"does not match {rule}"))
        case "minimum":
            yield source.problem(path, value, f"must be at least {rule}")
        case "exclusiveMinimum":
            yield source.problem(path, value, f"must be more than {rule}")
        case "maximum":
            yield source.problem(path, value, f"must be at most {rule}")
        case "exclusiveMaximum":
            yield source.problem(path, value, f"must be less than {rule}")
        case "minItems":
            yield source.problem(path, value, f"must have at least {rule} entries")
        case "minLength":
            yield source.problem(path, value, f"must have at least {rule} characters")
        case "maxLength":
            yield source.problem(path, value, f"must have at most {rule} characters")
        case _:
            yield source.problem(path, value, f"is refused by the schema's {error.validator!r}")


def _alternatives(error: ValidationError, source: YamlSource) -> Iterator[InvalidValue]:
    """Of the alternatives that all failed, the one the writer most likely meant."""
    path: KeyPath = tuple(error.absolute_path)
    schema: Any = error.schema
    if (title := schema.get("title")) in ("duration", "size"):
        examples = " or ".join(schema["examples"][:2])
        yield source.problem(path, error.instance, f"is not a {title}; write it with a unit, like {examples}")
        return
    branches: dict[int, list[ValidationError]] = {}
    for sub in error.context or ():
        branches.setdefault(int(sub.schema_path[0]), []).append(sub)
    fitting = [subs for subs in branches.values() if not any(_wrong_kind(sub, error) for sub in subs)]
    if fitting:
        for sub in fitting[0]:
            yield from explain(sub, source)
        return
    rule: Any = error.validator_value
    yield source.problem(path, error.instance, "must be " + " or ".join(_branch_name(branch) for branch in rule))


def _wrong_kind(sub: ValidationError, error: ValidationError) -> bool:
    """Whether ``sub`` says that the whole value is of another kind than this alternative."""
    if tuple(sub.absolute_path) != tuple(error.absolute_path):
        return False
    return sub.validator in ("type", "const") or (sub.validator == "enum" and not isinstance(sub.instance, str))


def _branch_name(branch: dict[str, Any]) -> str:
    if "enum" in branch:
        return " or ".join(map(str, branch["enum"]))
    if branch.get("title") in ("duration", "size"):
        return f"a {branch['title']}"
    return _NAMES[branch.get("type", "object")]
