"""A YAML file as plain data in which every value knows its line.

PyYAML composes and resolves; this module only walks its nodes, so that an error found later, by a path such as
``("models", 3, "slo")``, can name the line. What JSON cannot say (dates, binary, NaN) is refused here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from prism.config.env import EnvError, expand_env, has_reference
from prism.config.errors import CatalogError
from prism.core.errors import InvalidValue

KeyPath = tuple[str | int, ...]

MAX_VALUES: Final = 200_000
"""Values after aliases are followed; a file that expands to more is an attack or a mistake."""
MAX_DEPTH: Final = 64
MAX_FILE_BYTES: Final = 32 << 20

_COLLECTIONS: Final = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_SCALARS: Final = {"str", "int", "float", "bool", "null"}


def dotted(path: KeyPath) -> str:
    """``("models", 3, "slo")`` as ``models[3].slo``; the whole document is ``catalog``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".") or "catalog"


@dataclass
class YamlSource:
    """The data of one file, and where each value stands in it."""

    file: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """1-based line of each value (of a mapping entry: its key)."""
    secret: dict[KeyPath, str] = field(default_factory=dict)
    """Values that came out of the environment, as they are written in the file; errors show this text."""
    problems: list[InvalidValue] = field(default_factory=list)
    """What is wrong with the text itself."""
    unknown: set[KeyPath] = field(default_factory=set)
    """Values that ``problems`` are about; what stands there instead says nothing."""

    def where(self, path: KeyPath) -> str:
        """``file:line`` of the value at ``path``, or of the nearest thing around it."""
        for end in range(len(path), -1, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return f"{self.file}:{line}"
        return self.file

    def shown(self, path: KeyPath, value: object) -> object:
        """``value`` as an error may show it: never what an environment variable held."""
        if path in self.secret:
            return self.secret[path]
        if any(inside[: len(path)] == path for inside in self.secret):
            return "..."
        return value

    def problem(self, path: KeyPath, value: object, why: str, choices: tuple[object, ...] = ()) -> InvalidValue:
        return InvalidValue(dotted(path), self.shown(path, value), why, choices, self.where(path))


def read_yaml(path: Path, env: Mapping[str, str] = os.environ) -> YamlSource:
    """Read the file at ``path``. Raises :class:`CatalogError` if it cannot be read or is no YAML."""
    return _sound(scan_file(path, env))


def scan_file(path: Path, env: Mapping[str, str] = os.environ) -> YamlSource:
    """:func:`read_yaml` that goes on after values that cannot be used (a variable that is not set): ``problems`` has
    them. Raises :class:`CatalogError` when there is no document."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _unreadable(path, f"is larger than {MAX_FILE_BYTES >> 20} MiB")
        return scan_yaml(path.read_bytes(), str(path), env)
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise _unreadable(path, f"cannot be read: {error}") from error


def parse_yaml(text: bytes, file: str, env: Mapping[str, str] = os.environ) -> YamlSource:
    """The document in ``text``. Raises :class:`CatalogError` with the line of everything that is wrong."""
    return _sound(scan_yaml(text, file, env))


def scan_yaml(text: bytes, file: str, env: Mapping[str, str] = os.environ) -> YamlSource:
    """:func:`scan_file` of a file's ``text``."""
    source = YamlSource(file)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise CatalogError([_yaml_problem(file, error)]) from error
    except (RecursionError, UnicodeError, ValueError) as error:
        raise CatalogError([InvalidValue("catalog", "...", f"is not valid YAML: {error}", where=file)]) from error
    if node is None:
        raise CatalogError([InvalidValue("catalog", "", "is empty", where=f"{file}:1")])
    walk = _Walk(loader, source, env)
    source.data = walk.value(node, ())
    return source


def _sound(source: YamlSource) -> YamlSource:
    if source.problems:
        raise CatalogError(source.problems)
    return source


def _unreadable(path: Path, why: str) -> CatalogError:
    return CatalogError([InvalidValue("catalog", str(path), why)])


def _yaml_problem(file: str, error: yaml.YAMLError) -> InvalidValue:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        what = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        snippet = (mark.get_snippet(indent=0, max_length=80) or "").split("\n")[0]
        return InvalidValue("catalog", snippet, f"is not valid YAML: {what}", where=f"{file}:{mark.line + 1}")
    return InvalidValue("catalog", "...", f"is not valid YAML: {str(error).splitlines()[0]}", where=file)


class _Walk:
    """One pass over the nodes of a document: checks them, builds the data, notes the lines."""

    def __init__(self, loader: yaml.SafeLoader, source: YamlSource, env: Mapping[str, str]) -> None:
        self.loader, self.source, self.env = loader, source, env
        self.count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.source.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if self.count > MAX_VALUES or len(path) > MAX_DEPTH:
            # Also ends the walk of an alias that contains itself.
            raise CatalogError([self.source.problem(path[:4], "...", "is nested too deep or too large")])
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _COLLECTIONS:
            return self._refuse(path, node.tag, "has a YAML tag, which is not plain data", node)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        return dict(self._entries(node, path))

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        self._refuse_duplicates(node, path)
        try:
            self.loader.flatten_mapping(node)  # resolves `<<: *defaults`; the node's own keys come last and win
        except (yaml.YAMLError, RecursionError) as error:
            self._refuse(path, "<<", f"cannot be merged: {getattr(error, 'problem', error)}", node)
            return
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(path, "...", "has a key that is not text", key_node)
                continue
            key = str(key_node.value)
            self.source.lines[(*path, key)] = key_node.start_mark.line + 1
            yield key, self.value(value_node, (*path, key))

    def _refuse_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag.endswith(":merge"):
                continue
            if key in first:
                self._refuse((*path, key), key, f"is given twice (first in line {first[key]})", key_node)
            first.setdefault(key, key_node.start_mark.line + 1)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if has_reference(node.value):
            return self._from_env(node, path)
        return self._resolved(node, path)

    def _from_env(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            text = expand_env(node.value, self.env)
        except EnvError as error:
            self._refuse(path, node.value, str(error), node)
            return node.value  # stands for the text that is missing
        self.source.secret[path] = node.value
        if node.style is None:  # unquoted: `port: ${env:PORT}` is a number
            tag = self.loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
            return self._resolved(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark), path)
        return text

    def _resolved(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind == "timestamp":
            return str(node.value)
        if kind not in _SCALARS or not node.tag.startswith("tag:yaml.org,2002:"):
            return self._refuse(path, node.value, f"has the YAML tag {node.tag}, which is not plain data", node)
        try:
            value = self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, IndexError, KeyError) as error:
            return self._refuse(path, node.value, f"is not a valid {kind}: {error}", node)
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(path, node.value, "is not a finite number", node)
        return value

    def _refuse(self, path: KeyPath, value: object, why: str, node: yaml.Node) -> None:
        where = f"{self.source.file}:{node.start_mark.line + 1}"
        self.source.problems.append(InvalidValue(dotted(path), value, why, where=where))
        self.source.unknown.add(path)
