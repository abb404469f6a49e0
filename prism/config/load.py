"""From a YAML file to checked sections: read, fill in defaults, validate against the schema, convert, cross-check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from prism.config.checks import cross_checks
from prism.config.document import CatalogFile
from prism.config.errors import CatalogError
from prism.config.schema import schema_problems
from prism.config.units import Seconds, parse_duration_s, parse_size_bytes
from prism.config.yaml_source import YamlSource, parse_yaml, read_yaml

_MERGED_KEYS = ("slo", "engine_args")
"""Options of which a model may set some parts and take the others from ``defaults``."""


def load_file(path: Path, env: Mapping[str, str]) -> CatalogFile:
    """The checked document at ``path``. Raises :class:`CatalogError`."""
    return _checked(read_yaml(path, env))


def load_text(text: bytes, file: str, env: Mapping[str, str]) -> CatalogFile:
    """The checked document in ``text``, whose errors are said to be in ``file``. Raises :class:`CatalogError`."""
    return _checked(parse_yaml(text, file, env))


def _checked(source: YamlSource) -> CatalogFile:
    problems = schema_problems(source)
    if problems:
        raise CatalogError(problems)
    try:
        document = msgspec.convert(_with_defaults(source.data), CatalogFile, dec_hook=_convert)
    except msgspec.ValidationError as error:  # what the schema allows and the objects refuse, such as 1e300 for an int
        raise CatalogError([source.problem((), "...", str(error))]) from error
    problems = cross_checks(document, source)
    if problems:
        raise CatalogError(problems)
    return document


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    defaults = data.get("defaults") or {}
    return {**data, "models": [_merged(defaults, model) for model in data["models"]]}


def _merged(defaults: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **model}
    for key in _MERGED_KEYS:
        if key in defaults and key in model:
            merged[key] = {**defaults[key], **model[key]}
    return merged


def _convert(kind: type, value: object) -> object:
    return parse_duration_s(value) if kind is Seconds else parse_size_bytes(value)
