"""The JSON schema of a catalog, generated from :mod:`prism.config.sections`, and the check of a document against it.

``prism/config/schema.json`` is this schema, shipped for editors; a test keeps it equal to :func:`catalog_schema`.
"""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, get_args, get_type_hints

import jsonschema
import msgspec

from prism.config.document import CatalogFile
from prism.config.explain import explain
from prism.config.sections.base import Section
from prism.config.sections.policy import catalog_key
from prism.config.units import DURATION_PATTERN, SIZE_PATTERN, Bytes, Seconds, format_duration, written
from prism.config.yaml_source import YamlSource
from prism.core.errors import InvalidValue
from prism.core.settings import PolicySettings

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_CUSTOM: Final[dict[type, dict[str, Any]]] = {
    Seconds: {
        "anyOf": [{"type": "string", "pattern": DURATION_PATTERN}, {"const": 0}],
        "title": "duration",
        "examples": ["500ms", "2s", "1m30s"],
    },
    Bytes: {
        "anyOf": [{"type": "string", "pattern": SIZE_PATTERN}, {"const": 0}],
        "title": "size",
        "examples": ["64MiB", "1.5GB"],
    },
}


def catalog_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a catalog file, with descriptions and defaults."""
    schema = section_schema(CatalogFile, "Prism catalog")
    _add_policy_defaults(schema["$defs"]["PolicyConfig"])
    return _as_json(schema)


def section_schema(root: type[Section], title: str) -> dict[str, Any]:
    """JSON schema of a file that holds a ``root``, with descriptions and defaults."""
    (_,), components = msgspec.json.schema_components([root], schema_hook=_custom, ref_template="#/$defs/{name}")
    for kind in _sections(root):
        _add_defaults(kind, components[kind.__name__])
    return _as_json({"$schema": DIALECT, "title": title, **components.pop(root.__name__), "$defs": components})


def _as_json(schema: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    return plain


def shipped_schema() -> dict[str, Any]:
    """The schema file that lies beside this module."""
    schema: dict[str, Any] = json.loads(files(__package__).joinpath("schema.json").read_text("utf-8"))
    return schema


def schema_problems(source: YamlSource) -> list[InvalidValue]:
    """Everything in ``source`` that the catalog's schema forbids, in file order."""
    return problems_in(source, _validator())


def problems_in(source: YamlSource, validator: jsonschema.Draft202012Validator) -> list[InvalidValue]:
    """Everything in ``source`` that ``validator`` refuses, in file order."""
    found = [problem for error in validator.iter_errors(source.data) for problem in explain(error, source)]
    return sorted({str(problem): problem for problem in found}.values(), key=_line)


def _line(problem: InvalidValue) -> int:
    """0 for data that came from no file."""
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def _custom(kind: type) -> dict[str, Any]:
    return deepcopy(_CUSTOM[kind])  # msgspec hands it on as it is, and defaults are written into it


def _sections(root: type[Section]) -> set[type[Section]]:
    """``root`` and every section inside it."""
    found: set[type[Section]] = set()
    queue: list[Any] = [root]
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, Section) and kind not in found:
            found.add(kind)
            queue += get_type_hints(kind).values()
        queue += get_args(kind)
    return found


def _add_defaults(section: type[Section], schema: dict[str, Any]) -> None:
    """Defaults made by factories are values of our own types, which msgspec leaves out of the schema."""
    for info in msgspec.structs.fields(section):
        if info.default_factory is not msgspec.NODEFAULT:
            value = info.default_factory()
            if isinstance(value, Seconds | Bytes):
                schema["properties"][info.encode_name]["default"] = written(value)


def _add_policy_defaults(schema: dict[str, Any]) -> None:
    settings = PolicySettings()
    for part in (settings.cluster, settings.gpu):
        for info in dataclasses.fields(part):
            value = getattr(part, info.name)
            key = schema["properties"].get(catalog_key(info.name))
            if key is not None and value is not None:
                key["default"] = _plain(info.name, value)


def _plain(name: str, value: Any) -> Any:
    """A setting as the catalog writes it."""
    if name.endswith("_s"):
        return format_duration(value)
    return dict(value) if isinstance(value, tuple) else value


@lru_cache(maxsize=1)
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(catalog_schema())
