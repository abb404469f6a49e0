"""From a YAML file to checked sections: read, fill in defaults, validate against the schema, convert, cross-check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prism.config.checks import cross_checks
from prism.config.document import CatalogFile
from prism.config.errors import CatalogError
from prism.config.schema import schema_problems
from prism.config.units import Seconds, parse_duration_s, parse_size_bytes
from prism.config.yaml_source import KeyPath, YamlSource, dotted, scan_file, scan_yaml
from prism.core.errors import InvalidValue

_MERGED_KEYS = ("slo", "engine_args")
"""Options of which a model may set some parts and take the others from ``defaults``."""
_ADAPTER_INHERITS = ("slo", "late", "max_wait")
"""Options of a base that its adapters have too when they do not set them."""


def load_file(path: Path, env: Mapping[str, str]) -> CatalogFile:
    """The checked document at ``path``. Raises :class:`CatalogError`."""
    return _sound(examine_file(path, env))


def load_text(text: bytes, file: str, env: Mapping[str, str]) -> CatalogFile:
    """The checked document in ``text``, whose errors are said to be in ``file``. Raises :class:`CatalogError`."""
    return _sound(_examine(scan_yaml(text, file, env)))


def examine_file(path: Path, env: Mapping[str, str]) -> Examined:
    """The document at ``path`` and all that is wrong with it: a variable that is not set hides no other problem. Raises
    :class:`CatalogError` for what is no YAML file."""
    return _examine(scan_file(path, env))


class Examined(NamedTuple):
    """``document``: None when the problems leave none to look at."""

    document: CatalogFile | None
    problems: list[InvalidValue]


def _sound(examined: Examined) -> CatalogFile:
    if examined.problems or examined.document is None:
        raise CatalogError(examined.problems)
    return examined.document


def _examine(source: YamlSource) -> Examined:
    found = schema_problems(source)
    problems = [*source.problems, *_elsewhere(source, found)]
    if len(problems) > len(source.problems) or any(_stays(problem, source) for problem in found):
        return Examined(None, problems)
    try:
        document = msgspec.convert(_with_defaults(source.data), CatalogFile, dec_hook=_convert)
    except msgspec.ValidationError as error:  # what the schema allows and the objects refuse, such as 1e300 for an int
        return Examined(None, problems or [source.problem((), "...", str(error))])
    return Examined(document, problems + _about_others(source, cross_checks(document, source)))


def _elsewhere(source: YamlSource, found: list[InvalidValue]) -> list[InvalidValue]:
    """The schema's problems that are not about a value which is wrong already. Such values are taken out, so that the
    rest can be looked at."""
    for path in source.unknown:
        if any(_is_about(problem, path) for problem in found):
            _take_out(source.data, path)
    return _about_others(source, found)


def _stays(problem: InvalidValue, source: YamlSource) -> bool:
    """Whether what ``problem`` is about is wrong and still there: an item of a list cannot be taken out, since those
    behind it would have other places, and neither can the whole file."""
    return any(not path or (isinstance(path[-1], int) and _is_about(problem, path)) for path in source.unknown)


def _take_out(data: Any, path: KeyPath) -> None:
    for part in path[:-1]:
        data = data.get(part, {}) if isinstance(data, dict) else data[part]
    if path and isinstance(data, dict):
        data.pop(path[-1], None)


def _about_others(source: YamlSource, found: list[InvalidValue]) -> list[InvalidValue]:
    return [problem for problem in found if not any(_is_about(problem, path) for path in source.unknown)]


def _is_about(problem: InvalidValue, path: KeyPath) -> bool:
    """Whether ``problem`` is about the value at ``path`` or something in it."""
    return problem.key == dotted(path) or problem.key.startswith((f"{dotted(path)}.", f"{dotted(path)}["))


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    defaults = data.get("defaults") or {}
    models = {name: m for m in data["models"] for name in (m.get("name"), *m.get("aliases", ()))}
    return {**data, "models": [_merged(_inherited(defaults, models, model), model) for model in data["models"]]}


def _inherited(defaults: dict[str, Any], models: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What ``model`` has where it says nothing itself."""
    if model.get("base") is None:
        return defaults
    of_base = _merged(defaults, models.get(model["base"], {}))
    return {key: value for key, value in of_base.items() if key in _ADAPTER_INHERITS}


def _merged(defaults: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **model}
    for key in _MERGED_KEYS:
        if key in defaults and key in model:
            merged[key] = {**defaults[key], **model[key]}
    return merged


def _convert(kind: type, value: object) -> object:
    return parse_duration_s(value) if kind is Seconds else parse_size_bytes(value)
