"""``${env:NAME}`` in catalog values. ``$${env:`` stands for the literal text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_REFERENCE: Final = re.compile(r"(\$?)\$\{env:([^}]*)(\}?)")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class EnvError(ValueError):
    """A reference that cannot be expanded; ``why`` and ``names`` (set variables with a similar name) say what to do."""


def has_reference(text: str) -> bool:
    """Whether :func:`expand_env` would change ``text``."""
    return "${env:" in text


def expand_env(text: str, env: Mapping[str, str]) -> str:
    """``text`` with each ``${env:NAME}`` replaced once. Raises :class:`EnvError` for unset or malformed names."""

    def replace(match: re.Match[str]) -> str:
        escaped, name, closed = match.groups()
        if escaped:
            return match[0][1:]
        if not closed:
            raise EnvError("a ${env:NAME} reference is not closed with }")
        if not _NAME.match(name):
            raise EnvError(f"{name!r} is not the name of an environment variable")
        if name not in env:
            raise EnvError(f"environment variable {name} is not set")
        return env[name]

    return _REFERENCE.sub(replace, text)
